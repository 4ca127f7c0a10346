// The computing warpgroups at tiles of 64 query rows: S = Q K^T, softmax, O += P V.
#pragma once

#include "backends/cuda/sm90/mla_decode/finish.cuh"
#include "backends/cuda/sm90/mla_decode/visible_keys.cuh"
#include "backends/cuda/sm90/mla_decode/wide_block.cuh"
#include "backends/cuda/sm90/ptx/wgmma_rows.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::mla {

/// Where statistics of a thread's rows g and g + 8 lie, side by side.
__device__ __forceinline__ int stat_index() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
}

/// O of one warpgroup: [64 rows, 256 channels] in chunks of 64 channels.
using WideOutput = OutputFragment<kWideRows>;

__device__ __forceinline__ void pin_output(WideOutput& out) {
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
}

/// A warpgroup at work on one job. A thread has two rows: g and g + 8 of its warp's 16.
template <typename T, int kSide>
class WideAttention {
 public:
  __device__ WideAttention(const KernelParams& k, const Job& job, WideMemory& s,
                           std::uint32_t (&turn)[2])
      : k_(k), job_(job), s_(s), turn_(turn), visible_(visible_keys(k, job)) {
    const int lane = threadIdx.x % 32;
    // Lane l addresses row l % 8 of matrix l / 8: rows g, then g + 8, of 8 keys, then of the next.
    const int row_of_weights = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    weights_at_ = ptx::shared_address(s.keys[kSide][kRopeChunk]) + row_of_weights * 128 +
                  ((lane / 16 ^ row_of_weights % 8) << 4);
    asm volatile("" : "+r"(weights_at_));  // Not to be found anew for every tile.
  }

  /// Runs the job's key tiles; maxima and sums are in s.handover.message then.
  __device__ __forceinline__ void run(WideOutput& out) {
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int e = 0; e < kWideRows / 2; ++e) out[i][e] = 0.f;
    }
    if constexpr (kSide == kLeft) {
      run_left(out);
    } else {
      run_right(out);
    }
    publish_sums();
  }

 private:
  using Weights = std::uint32_t[kKeyTile / 16][4];

  /// Chunks of the next tile that are scored before the place of the other side's is given back.
  static constexpr int kFirstChunks = 4;

  /// Issues S [64, 64 keys] = Q K^T over chunks [kBegin, kEnd) in the order in which they come.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void issue_scores(float (&score)[kKeyTile / 2]) {
    std::uint64_t q = ptx::swizzled_operand(ptx::shared_address(s_.q[0]));
    std::uint64_t keys = ptx::swizzled_operand(ptx::shared_address(s_.keys[kSide][0]));
    asm volatile("" : "+l"(q), "+l"(keys));  // Sums of them, hoisted, would spill.
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const int chunk = i == kRopeChunk ? i : (i + kSide * kChunksPerOutput) % kRopeChunk;
      ptx::mbarrier_wait(ptx::shared_address(&s_.full[kSide][chunk]), turn_[kSide] & 1);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        constexpr std::uint32_t kChunk = kChunkBytes >> 4;
        ptx::wgmma_scores<T, kKeyTile>(score, q + chunk * kChunk + step * 2,
                                       keys + chunk * kChunk + step * 2, i + step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V of this side's tile, P in registers.
  __device__ __forceinline__ void issue_own(WideOutput& out, const Weights& weights) {
    std::uint64_t values = ptx::swizzled_columns(
        ptx::shared_address(s_.keys[kSide][kSide * kChunksPerOutput]), kChunkBytes);
    asm volatile("" : "+l"(values));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      ptx::wgmma_outputs_256<T>(out, weights[step], values + step * (16 * 128 >> 4));
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V of the other side's tile.
  __device__ __forceinline__ void issue_other(WideOutput& out) {
    constexpr int kOther = 1 - kSide;
    std::uint64_t p = ptx::swizzled_operand(ptx::shared_address(s_.keys[kOther][kRopeChunk]));
    std::uint64_t values = ptx::swizzled_columns(
        ptx::shared_address(s_.keys[kOther][kSide * kChunksPerOutput]), kChunkBytes);
    asm volatile("" : "+l"(p), "+l"(values));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      ptx::wgmma_outputs_256<T>(out, p + step * 2, values + step * (16 * 128 >> 4));
    }
    ptx::wgmma_commit();
  }

  /// This side has read its half of a tile, and what goes with it.
  __device__ __forceinline__ void release(int tile) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.empty[tile][kSide]));
  }

  /// Moves the rows' reference to another one; outputs are to be multiplied by what comes back.
  __device__ __forceinline__ float2 move_reference(float2 to) {
    // -inf after -inf: nothing is visible yet.
    const float2 factor{to.x == reference_.x ? 1.f : exp2_approx(reference_.x - to.x),
                        to.y == reference_.y ? 1.f : exp2_approx(reference_.y - to.y)};
    reference_ = to;
    sum_.x *= factor.x;
    sum_.y *= factor.y;
    return factor;
  }

  __device__ __forceinline__ void scale_output(WideOutput& out, float2 factor) const {
    if (!__any_sync(~0u, factor.x != 1.f || factor.y != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int e = 0; e < kWideRows / 2; ++e) out[i][e] *= e / 2 % 2 == 0 ? factor.x : factor.y;
    }
  }

  /// Over a thread's keys; four chains at a time.
  static __device__ __forceinline__ float2 max_of_rows(const float (&score)[kKeyTile / 2]) {
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kKeyTile / 4; ++i) {
      float& to = top[i % 4];
      to = fmaxf(to, fmaxf(score[2 * i], score[2 * i + 1]));
    }
    return float2{fmaxf(top[0], top[2]), fmaxf(top[1], top[3])};
  }

  /// Products beyond this are rounded before the reference is taken off: their rounding error would
  /// be worth whole powers of two.
  static __device__ __forceinline__ bool is_large(float top) {
    return fabsf(top) > (1 << 20) && top != -INFINITY;
  }

  /// Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void mask_tile(float (&score)[kKeyTile / 2],
                                            std::int32_t first_key) const {
    const bool drafts = has_drafts(k_, job_, first_key);
    const std::int32_t first_draft = job_.seq_len - job_.query_len - first_key;
    std::uint64_t seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SeenKeys& of_row = s_.seen[threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r];
      seen[r] = bits_between<std::uint64_t>(of_row.begin - first_key, of_row.end - first_key);
      if (drafts) seen[r] &= drafts_of_tile(of_row.drafts, first_draft);
    }
    mask_unseen<kKeyTile>(score, seen);
  }

  /// Weights of a tile from its scores, which are complete; to the other side, too. Outputs are to
  /// be multiplied by what comes back.
  __device__ __forceinline__ float2 weigh(float (&score)[kKeyTile / 2], std::int32_t tile,
                                          Weights& weights) {
    const std::int32_t first_key = tile * kKeyTile;
    const bool border = !visible_.are_common(first_key, first_key + kKeyTile);
    if (border) mask_tile(score, first_key);
    float scale = k_.op.sm_scale * kLog2e;
    float2 top = max_of_rows(score);
    top = float2{max_of_quad(top.x) * scale, max_of_quad(top.y) * scale};
    if (__any_sync(~0u, is_large(top.x) || is_large(top.y))) {
#pragma unroll
      for (float& x : score) x *= scale;
      scale = 1.f;
    }
    const float2 factor =
        move_reference({top.x <= reference_.x + kMaxLag ? reference_.x : top.x,
                        top.y <= reference_.y + kMaxLag ? reference_.y : top.y});
    const float2 base{reference_.x == -INFINITY ? 0.f : reference_.x,
                      reference_.y == -INFINITY ? 0.f : reference_.y};
    float2 sums[2] = {};
#pragma unroll
    for (int i = 0; i < kKeyTile / 4; ++i) {
      const float from = i % 2 == 0 ? base.x : base.y;
      const float a = exp2_approx(fmaf(score[2 * i], scale, -from));
      const float b = exp2_approx(fmaf(score[2 * i + 1], scale, -from));
      float2& sum = sums[i / 2 % 2];
      (i % 2 == 0 ? sum.x : sum.y) += a + b;
      weights[i / 4][i % 4] = pack<T>(a, b);
    }
    sum_.x += sums[0].x + sums[1].x;
    sum_.y += sums[0].y + sums[1].y;
    // All warps have their scores: the rope chunk, and values that spoil, may go.
    ptx::named_barrier(kSideBarrier + kSide, 128);
    if (border) {
      zero_spoiling_keys<T>(visible_, first_key, [&](int chunk) { return s_.keys[kSide][chunk]; });
    }
    hand_over(weights);
    if (border) ptx::named_barrier(kSideBarrier + kSide, 128);  // For its own product, too.
    return factor;
  }

  /// Gives the other side P, and what it is relative to.
  __device__ __forceinline__ void hand_over(const Weights& weights) {
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      ptx::store_matrices(weights_at_ ^ (step << 5), weights[step]);
    }
    if (threadIdx.x % 4 == 0) {
      *reinterpret_cast<float2*>(&s_.reference[kSide][stat_index()]) = reference_;
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(ptx::shared_address(&s_.p_full[kSide]));
  }

  /// Waits for the other side's P and makes outputs relative to what it is.
  __device__ __forceinline__ void take_over(WideOutput& out) {
    constexpr int kOther = 1 - kSide;
    ptx::mbarrier_wait(ptx::shared_address(&s_.p_full[kOther]), turn_[kOther] & 1);
    scale_output(out, move_reference(*reinterpret_cast<const float2*>(
                          &s_.reference[kOther][stat_index()])));
  }

  __device__ __forceinline__ void run_left(WideOutput& out) {
    const std::int32_t begin = __shfl_sync(~0u, job_.tile_begin, 0);
    const std::int32_t end = __shfl_sync(~0u, job_.tile_end, 0);
    if (begin == end) return;
    float score[kKeyTile / 2];
    Weights weights;
    issue_scores<0, kChunks>(score);
#pragma unroll 1
    for (std::int32_t tile = begin;; tile += 2) {
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      scale_output(out, weigh(score, tile, weights));
      pin_output(out);
      issue_own(out, weights);
      ptx::wgmma_wait<0>();
      pin_output(out);
      release(0);
      ++turn_[0];
      if (tile + 1 == end) break;
      take_over(out);
      pin_output(out);
      issue_other(out);
      if (tile + 2 == end) {
        ptx::wgmma_wait<0>();
        pin_output(out);
        release(1);
        ++turn_[1];
        break;
      }
      issue_scores<0, kFirstChunks>(score);
      ptx::wgmma_wait<1>();
      pin_output(out);
      release(1);
      ++turn_[1];
      issue_scores<kFirstChunks, kChunks>(score);
    }
  }

  __device__ __forceinline__ void run_right(WideOutput& out) {
    const std::int32_t begin = __shfl_sync(~0u, job_.tile_begin, 0);
    const std::int32_t end = __shfl_sync(~0u, job_.tile_end, 0);
    float score[kKeyTile / 2];
    Weights weights;
    std::int32_t tile = begin;
#pragma unroll 1
    for (; tile + 1 < end; tile += 2) {
      issue_scores<0, kChunks>(score);
      take_over(out);
      pin_output(out);
      issue_other(out);
      ++turn_[0];
      ptx::wgmma_wait<1>();
      ptx::pin(score);
      const float2 factor = weigh(score, tile + 1, weights);
      ptx::wgmma_wait<0>();
      pin_output(out);
      release(0);
      scale_output(out, factor);
      pin_output(out);
      issue_own(out, weights);
      ++turn_[1];
      ptx::wgmma_wait<0>();
      pin_output(out);
      release(1);
    }
    if (tile == end) return;
    take_over(out);  // The last pair lacks its second tile.
    pin_output(out);
    issue_other(out);
    ++turn_[0];
    ptx::wgmma_wait<0>();
    pin_output(out);
    release(0);
  }

  /// Both sides end with one reference. The maximum passes over a NaN; a merge must not take its
  /// row for an empty one.
  __device__ __forceinline__ void publish_sums() {
    Handover<kWideRows>& h = s_.handover;
    const float2 sum{sum_of_quad(sum_.x), sum_of_quad(sum_.y)};
    if (threadIdx.x % 4 == 0) {
      *reinterpret_cast<float2*>(&s_.sums[kSide][stat_index()]) = sum;
      if (kSide == kLeft) *reinterpret_cast<float2*>(&h.message[0][stat_index()]) = reference_;
    }
    ptx::named_barrier(kOutputBarrier, kOutputThreads);
    if (threadIdx.x < kWideRows) {
      const float total = s_.sums[0][threadIdx.x] + s_.sums[1][threadIdx.x];
      h.message[1][threadIdx.x] = total;
      if (isnan(total)) h.message[0][threadIdx.x] = total;
    }
    ptx::named_barrier(kOutputBarrier, kOutputThreads);
  }

  const KernelParams& k_;
  const Job& job_;
  WideMemory& s_;
  std::uint32_t (&turn_)[2];  ///< Counts the tiles of each side.
  const VisibleKeys visible_;
  std::uint32_t weights_at_;  ///< Where the lane's part of P begins: of 16 keys, then of the next.
  float2 reference_{-INFINITY, -INFINITY};  ///< Of outputs and sums (log2 units).
  float2 sum_{0.f, 0.f};                    ///< Over the thread's keys of this side's tiles.
};

/// Fragments as WideAttention has them.
struct WideOrder {
  static constexpr int kStep = 1;
  static constexpr int kFlight = 8;
};

template <>
constexpr int kValuesAtOnce<WideOrder> = 4;

template <>
struct FragmentPlace<kWideRows, WideOrder> {
  static __device__ int index(int chunk, int j, int thread) {
    return thread / 4 * kPairValues + (chunk * 8 + j) * 4 + thread % 4;
  }
  static __device__ float4 values(const float* d) { return float4{d[0], d[2], d[1], d[3]}; }
  static __device__ int row(int pair, int i) { return pair / 8 * 16 + pair % 8 + 8 * i; }
  static __device__ int channel(int index) {
    return index % kPairValues / 4 * 8 + index % 4 * 2;
  }
};

/// Writes normalised outputs straight from the fragments.
template <int kRows>
__device__ void store_output(WideOrder, const KernelParams& k, const Job& job,
                             const Handover<kRows>& s, const WideOutput& out) {
  const MlaDecodeParams& op = k.op;
  const int first_channel = threadIdx.x / 128 * (kLatent / 2) + threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    if (row >= job.num_rows) continue;
    const float max = s.message[0][stat_index() + r], sum = s.message[1][stat_index() + r];
    const float inverse = inverse_sum(k, job, row, max, sum);
    if (first_channel == 0) store_lse(k, job, row, max, sum);
    const std::int64_t at = out_offset(k, job, row) + first_channel;
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float a = out[i][4 * j + 2 * r] * inverse, b = out[i][4 * j + 2 * r + 1] * inverse;
        const std::int64_t to = at + i * 64 + j * 8;
        if (op.out_type == ElementType::f32) {
          static_cast<float*>(op.out)[to] = a;
          static_cast<float*>(op.out)[to + 1] = b;
        } else {
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(op.out) + to) =
              op.out_type == ElementType::bf16 ? pack<__nv_bfloat16>(a, b) : pack<__half>(a, b);
        }
      }
    }
  }
}

}  // namespace fovea::cuda::mla
