// Norm, rotation, merge and padding.
#include "backends/cuda/index_checks.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/plain/rotation.cuh"

namespace fovea::cuda::plain {
namespace {

/// A block per row.
__global__ void rms_norm_kernel(RmsNormParams p) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t width = p.x.shape[1];
  const double scale = rms_norm_scale(
      width, p.eps, [&](std::int64_t d) { return load(p.x.data, p.x.dtype, at(p.x, t, d)); });
  for (std::int64_t d = threadIdx.x; d < width; d += kThreads) {
    const double x = load(p.x.data, p.x.dtype, at(p.x, t, d));
    const double weight = load(p.weight.data, p.weight.dtype, at(p.weight, d));
    store(p.out.data, p.out.dtype, at(p.out, t, d), static_cast<float>(x * scale * weight));
  }
}

/// A block per row.
__global__ void add_residual_kernel(AddResidualParams p) {
  const std::int64_t t = blockIdx.x;
  for (std::int64_t d = threadIdx.x; d < p.x.shape[1]; d += kThreads) {
    const double x = load(p.x.data, p.x.dtype, at(p.x, t, d));
    const double y = load(p.y.data, p.y.dtype, at(p.y, t, d));
    store(p.x.data, p.x.dtype, at(p.x, t, d), static_cast<float>(x + double{p.scale} * y));
  }
}

/// A block per token and head.
__global__ void rope_kernel(RopeParams p, DeviceFault* fault) {
  const std::int64_t t = blockIdx.x / p.x.shape[1];
  if (!has_positions(fault, p.angles, t)) return;
  const std::int64_t n = blockIdx.x % p.x.shape[1];
  for (std::int64_t pair = threadIdx.x; pair < p.x.shape[2] / 2; pair += kThreads) {
    const TurnedPair turned = turn_pair(p.angles, t, pair, p.x.dtype, [&](std::int64_t i) {
      return load(p.x.data, p.x.dtype, at(p.x, t, n, i));
    });
    store(p.x.data, p.x.dtype, at(p.x, t, n, turned.first), turned.first_value);
    store(p.x.data, p.x.dtype, at(p.x, t, n, turned.second), turned.second_value);
  }
}

/// Bit for bit where the factor is 1.
__device__ void scale_row(const TensorView& from, const TensorView& to, std::int64_t t,
                          std::int64_t n, double factor) {
  for (std::int64_t d = threadIdx.x; d < to.shape[2]; d += kThreads) {
    if (factor == 1) {
      copy_element(from.data, from.dtype, at(from, t, n, d), to.data, to.dtype, at(to, t, n, d));
    } else {
      const double value = load(from.data, from.dtype, at(from, t, n, d));
      store(to.data, to.dtype, at(to, t, n, d), static_cast<float>(value * factor));
    }
  }
}

/// A block per token and head. The result may lie where an input does.
__global__ void merge_state_kernel(MergeStateParams p) {
  const TensorView& out = p.result.out;
  const std::int64_t t = blockIdx.x / out.shape[1];
  const std::int64_t n = blockIdx.x % out.shape[1];
  const double prefix_lse = load_f32(p.prefix.lse, at(p.prefix.lse, n, t));
  const double suffix_lse = load_f32(p.suffix.lse, at(p.suffix.lse, n, t));
  const bool no_prefix = isinf(prefix_lse), no_suffix = isinf(suffix_lse);
  const double sink = p.sinks.data ? load_f32(p.sinks, at(p.sinks, n)) : -INFINITY;
  __syncthreads();  // All have read what the result may overwrite.
  // What the sink leaves of the weights that `lse` is of.
  const auto share = [&](double lse) { return 1 / (1 + exp(sink - lse)); };
  double lse = -INFINITY;
  if (no_prefix && no_suffix) {
    for (std::int64_t d = threadIdx.x; d < out.shape[2]; d += kThreads) {
      store(out.data, out.dtype, at(out, t, n, d), 0.f);
    }
  } else if (no_prefix || no_suffix) {
    lse = no_suffix ? prefix_lse : suffix_lse;
    scale_row(no_suffix ? p.prefix.out : p.suffix.out, out, t, n, share(lse));
  } else {
    const double max = fmax(prefix_lse, suffix_lse);
    const double prefix_weight = exp(prefix_lse - max);
    const double suffix_weight = exp(suffix_lse - max);
    const double sum = prefix_weight + suffix_weight;
    lse = max + log(sum);
    const double factor = share(lse) / sum;
    for (std::int64_t d = threadIdx.x; d < out.shape[2]; d += kThreads) {
      const TensorView &a = p.prefix.out, &b = p.suffix.out;
      const double value = prefix_weight * load(a.data, a.dtype, at(a, t, n, d)) +
                           suffix_weight * load(b.data, b.dtype, at(b, t, n, d));
      store(out.data, out.dtype, at(out, t, n, d), static_cast<float>(value * factor));
    }
  }
  if (threadIdx.x == 0 && p.result.lse.data) {
    static_cast<float*>(p.result.lse.data)[at(p.result.lse, n, t)] = static_cast<float>(lse);
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
  launch(ctx, p.x.shape[0], rms_norm_kernel, p);
}

void add_residual(const OpContext& ctx, const AddResidualParams& p) {
  launch(ctx, p.x.shape[0], add_residual_kernel, p);
}

void rope(const OpContext& ctx, const RopeParams& p) {
  launch(ctx, p.x.shape[0] * p.x.shape[1], rope_kernel, p, ctx.device_fault);
}

void merge_state(const OpContext& ctx, const MergeStateParams& p) {
  launch(ctx, p.result.out.shape[0] * p.result.out.shape[1], merge_state_kernel, p);
}

void write_padding_rows(const OpContext& ctx, std::int64_t num_actual, const TensorView& out,
                        const TensorView& lse) {
  launch(ctx, (out.shape[0] - num_actual) * out.shape[1], padding_kernel, num_actual, out, lse);
}

}  // namespace fovea::cuda::plain
