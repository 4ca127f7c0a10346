// Norm, rotation, merge and padding.
#include "backends/cuda/index_checks.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/plain/rotation.cuh"
#include "backends/cuda/plain/rows.cuh"
#include "core/divisor.h"

namespace fovea::cuda::plain {
namespace {

// At least: rows that are no pieces of 16 bytes would take registers from the others.
constexpr int kBlocksPerMultiprocessor = 8;

/// A block per row.
__global__ void rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  const std::int64_t t = blockIdx.x;
  const ElementRow x(p.x, at(p.x, t)), weight(p.weight, 0), out(p.out, at(p.out, t));
  const double scale = rms_norm_scale(x, p.eps);
#pragma unroll 4
  for (std::int64_t i = threadIdx.x * kTogether; i < x.width(); i += blockDim.x * kTogether) {
    Values values = x.load(i);
    const Values weights = weight.load(i);
    for (int j = 0; j < kTogether; ++j) {
      values.at[j] = normed(values.at[j], scale, weights.at[j]);
    }
    out.store(i, values);
  }
}

/// A block per row.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    add_residual_kernel(const __grid_constant__ AddResidualParams p) {
  const std::int64_t t = blockIdx.x;
  const ElementRow x(p.x, at(p.x, t)), y(p.y, at(p.y, t));
  for (std::int64_t i = threadIdx.x * kTogether; i < x.width(); i += kThreads * kTogether) {
    Values sums = x.load(i);
    const Values added = y.load(i);
    for (int j = 0; j < kTogether; ++j) sums.at[j] = fmaf(p.scale, added.at[j], sums.at[j]);
    x.store(i, sums);
  }
}

/// A block per token and kThreads pairs of its heads, a thread per pair.
__global__ void rope_kernel(const __grid_constant__ RopeParams p, Divisor blocks_per_token,
                            Divisor pairs_per_head, DeviceFault* fault) {
  const std::int64_t t = blocks_per_token.quotient(blockIdx.x);
  const std::uint32_t i = blocks_per_token.remainder(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t n = pairs_per_head.quotient(i);
  if (n >= p.x.shape[1] || !has_positions(fault, p.angles, t)) return;
  const std::int64_t pair = pairs_per_head.remainder(i);
  const TurnedPair turned = turn_pair(p.angles, t, pair, p.x.dtype, [&](std::int64_t c) {
    return load(p.x.data, p.x.dtype, at(p.x, t, n, c));
  });
  store(p.x.data, p.x.dtype, at(p.x, t, n, turned.first), turned.first_value);
  store(p.x.data, p.x.dtype, at(p.x, t, n, turned.second), turned.second_value);
}

/// Lanes of a warp that work on a row: `count`, a power of two.
struct Lanes {
  int rank, count;
  __device__ explicit Lanes(int count)
      : rank(static_cast<int>(threadIdx.x) & (count - 1)), count(count) {}
  __device__ void sync() const {
    const int first = static_cast<int>(threadIdx.x) % Warp::kSize - rank;
    __syncwarp(~0u >> (Warp::kSize - count) << first);
  }
};

/// Bit for bit.
__device__ void copy_row(const TensorView& from, const TensorView& to, std::int64_t t,
                         std::int64_t n, const Lanes& lanes) {
  for (std::int64_t d = lanes.rank; d < to.shape[2]; d += lanes.count) {
    copy_element(from.data, from.dtype, at(from, t, n, d), to.data, to.dtype, at(to, t, n, d));
  }
}

/// A part without keys has lse -inf.
__device__ bool has_keys(float lse) { return !isinf(lse); }

/// What a row's parts are multiplied by, and the lse of both.
struct MergeWeights {
  float prefix = 0.f, suffix = 0.f;
  float lse = -INFINITY;
};

__device__ MergeWeights merge_weights(float prefix_lse, float suffix_lse, float sink) {
  const bool prefix = has_keys(prefix_lse), suffix = has_keys(suffix_lse);
  MergeWeights weights;
  if (!prefix && !suffix) return weights;
  const float max = prefix && suffix ? fmaxf(prefix_lse, suffix_lse)
                                     : (prefix ? prefix_lse : suffix_lse);
  weights.prefix = prefix ? expf(prefix_lse - max) : 0.f;
  weights.suffix = suffix ? expf(suffix_lse - max) : 0.f;
  const float sum = weights.prefix + weights.suffix;
  weights.lse = max + logf(sum);
  // What a sink leaves of the weights that the lse is of.
  const float factor = 1.f / (sum * (1.f + expf(sink - weights.lse)));
  weights.prefix *= factor;
  weights.suffix *= factor;
  return weights;
}

/// `count` lanes per token and head. The result may lie where an input does.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    merge_state_kernel(const __grid_constant__ MergeStateParams p, Divisor heads, int count) {
  const TensorView& out = p.result.out;
  const Lanes lanes(count);
  // No number of threads, which may pass 2^32.
  const std::uint32_t i = blockIdx.x * (kThreads / count) + threadIdx.x / count;
  const std::int64_t t = heads.quotient(i), n = heads.remainder(i);
  if (t >= out.shape[0]) return;
  const float prefix_lse = load_f32(p.prefix.lse, at(p.prefix.lse, n, t));
  const float suffix_lse = load_f32(p.suffix.lse, at(p.suffix.lse, n, t));
  const MergeWeights weights = merge_weights(
      prefix_lse, suffix_lse, p.sinks.data ? load_f32(p.sinks, at(p.sinks, n)) : -INFINITY);
  lanes.sync();  // All have read what the result may overwrite.
  if (lanes.rank == 0 && p.result.lse.data) {
    static_cast<float*>(p.result.lse.data)[at(p.result.lse, n, t)] = weights.lse;
  }
  const bool has_prefix = has_keys(prefix_lse), has_suffix = has_keys(suffix_lse);
  if (!has_suffix && weights.prefix == 1.f) return copy_row(p.prefix.out, out, t, n, lanes);
  if (!has_prefix && weights.suffix == 1.f) return copy_row(p.suffix.out, out, t, n, lanes);
  const ElementRow to(out, at(out, t, n));
  const ElementRow prefix(p.prefix.out, at(p.prefix.out, t, n));
  const ElementRow suffix(p.suffix.out, at(p.suffix.out, t, n));
  for (std::int64_t d = lanes.rank * kTogether; d < to.width(); d += lanes.count * kTogether) {
    // A part without keys may hold anything.
    const Values a = has_prefix ? prefix.load(d) : Values{};
    const Values b = has_suffix ? suffix.load(d) : Values{};
    Values merged;
    for (int j = 0; j < kTogether; ++j) {
      merged.at[j] = weights.prefix * a.at[j] + weights.suffix * b.at[j];
    }
    to.store(d, merged);
  }
}

/// A block per row past num_actual and head.
__global__ void padding_kernel(std::int64_t num_actual, TensorView out, TensorView lse) {
  const std::int64_t t = num_actual + blockIdx.x / out.shape[1];
  const std::int64_t n = blockIdx.x % out.shape[1];
  for (std::int64_t d = threadIdx.x; d < out.shape[2]; d += kThreads) {
    store(out.data, out.dtype, at(out, t, n, d), 0.f);
  }
  if (threadIdx.x == 0 && lse.data) static_cast<float*>(lse.data)[at(lse, n, t)] = -INFINITY;
}

}  // namespace

void rms_norm(const OpContext& ctx, const RmsNormParams& p) {
  // Few long rows in few steps, whose latencies are all there is. With 8192 rows it is 1.3 times as
  // slow: blocks of many threads wait for their sum together. The order of that sum must not depend
  // on the number of rows where bits must not.
  const PlanTarget& target = ctx.plan_target;
  const std::int64_t rows = p.x.shape[0], steps = p.x.shape[1] / (kThreads * kTogether);
  const bool is_few = rows <= 8 * target.num_workers || target.batch_invariant;
  const int threads = is_few && steps > 2 ? 4 * kThreads : kThreads;
  launch(ctx, LaunchShape{.blocks = rows, .threads = threads}, rms_norm_kernel, p);
}

void add_residual(const OpContext& ctx, const AddResidualParams& p) {
  launch(ctx, p.x.shape[0], add_residual_kernel, p);
}

void rope(const OpContext& ctx, const RopeParams& p) {
  const std::int64_t pairs = p.x.shape[2] / 2;
  const std::int64_t blocks_per_token = (p.x.shape[1] * pairs + kThreads - 1) / kThreads;
  if (blocks_per_token == 0) return;
  FOVEA_CHECK(blocks_per_token <= std::numeric_limits<std::int32_t>::max() / kThreads, unsupported,
              "rope: {} channel pairs of a token are more than a launch takes, 2^31 - 1",
              p.x.shape[1] * pairs);
  launch(ctx, p.x.shape[0] * blocks_per_token, rope_kernel, p, Divisor(blocks_per_token),
         Divisor(pairs), ctx.device_fault);
}

void merge_state(const OpContext& ctx, const MergeStateParams& p) {
  const std::int64_t heads = p.result.out.shape[1];
  if (heads == 0) return;
  const std::int64_t steps = (p.result.out.shape[2] + kTogether - 1) / kTogether;
  int lanes = 1;
  while (lanes < Warp::kSize && lanes < steps) lanes *= 2;
  launch_teams(ctx, p.result.out.shape[0] * heads, lanes, merge_state_kernel, p, Divisor(heads),
               lanes);
}

void write_padding_rows(const OpContext& ctx, std::int64_t num_actual, const TensorView& out,
                        const TensorView& lse) {
  launch(ctx, (out.shape[0] - num_actual) * out.shape[1], padding_kernel, num_actual, out, lse);
}

}  // namespace fovea::cuda::plain
