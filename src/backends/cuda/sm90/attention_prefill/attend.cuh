// The computing warpgroups: S = Q K^T, softmax, O += P V, 64 query rows each.
#pragma once

#include "backends/cuda/sm90/attention_prefill/block.cuh"
#include "backends/cuda/sm90/attention_prefill/clean_values.cuh"
#include "backends/cuda/sm90/ptx/wgmma_rows.cuh"
#include "backends/cuda/sm90/row_softmax.cuh"

namespace fovea::cuda::prefill {

template <typename W>
using ScoreFragment = float[W::kKeys / 2];
/// Weights of 16 keys each, as the A operand of a product.
template <typename W>
using WeightFragment = std::uint32_t[W::kKeys / 16][4];

/// Issues S = Q K^T of a key tile.
template <typename W>
__device__ __forceinline__ void issue_scores(ScoreFragment<W>& score, std::uint32_t q,
                                             std::uint32_t k) {
  const std::uint64_t q_operand = ptx::swizzled_operand(q);
  const std::uint64_t k_operand = ptx::swizzled_operand(k);
  constexpr int kQueryChunk = kQueryTile * 128 >> 4, kKeyChunk = W::kKeys * 128 >> 4;
#pragma unroll
  for (int chunk = 0; chunk < W::kQkChunks; ++chunk) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_scores<typename W::T, W::kKeys>(score, q_operand + chunk * kQueryChunk + step * 2,
                                                 k_operand + chunk * kKeyChunk + step * 2,
                                                 chunk + step > 0);
    }
  }
  ptx::wgmma_commit();
}

/// Issues O += P V of a value tile.
template <typename W>
__device__ __forceinline__ void issue_outputs(OutputFragment<W>& out,
                                              const WeightFragment<W>& weight, std::uint32_t v) {
  constexpr std::uint32_t kChunkBytes = W::kKeys * 128;
#pragma unroll
  for (int step = 0; step < W::kKeys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {
      const std::uint32_t at = v + part * (W::kColumns / 64) * kChunkBytes;
      ptx::wgmma_outputs<typename W::T, W::kColumns>(
          out[part], weight[step], ptx::swizzled_columns(at, kChunkBytes) + step * (16 * 128 >> 4));
    }
  }
  ptx::wgmma_commit();
}

template <typename W>
__device__ __forceinline__ void pin_outputs(OutputFragment<W>& out) {
#pragma unroll
  for (int part = 0; part < W::kParts; ++part) ptx::pin(out[part]);
}

template <typename W>
__device__ __forceinline__ void pack_weights(WeightFragment<W>& weight,
                                             const ScoreFragment<W>& score) {
#pragma unroll
  for (int i = 0; i < W::kKeys / 4; ++i) {
    weight[i / 4][i % 4] = pack<typename W::T>(score[2 * i], score[2 * i + 1]);
  }
}

/// A computing warpgroup at work on one item.
template <typename W>
struct Attention {
  const PrefillParams& op;
  SharedMemory<W>& s;
  const Item item;
  const int query_stage;
  const int lane = threadIdx.x % 32;
  const int group = threadIdx.x / 128;  ///< Of the two.
  const std::int32_t first_row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  RowKeys rows;      ///< Keys that the thread's rows see.
  Keys warp_common;  ///< Every row of the warp sees them.
  const KeyWalk<W::kKeys> walk;
  Softmax softmax;

  __device__ Attention(const PrefillParams& op, SharedMemory<W>& s, int query_stage)
      : op(op),
        s(s),
        item(s.item(query_stage)),
        query_stage(query_stage),
        warp_common(0, 0),
        walk(item.any, item.tile.num_paged) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows that do not exist see what the last one does.
      const std::int32_t row = min(first_row + 8 * r, item.tile.num_rows - 1);
      const Keys seen(visible_keys(op.variant, row, extent_of(item.tile)));
      rows.begin[r] = seen.begin;
      rows.end[r] = seen.end;
    }
    // Neither end decreases from a row to the next.
    warp_common = {__shfl_sync(~0u, rows.begin[1], 31), __shfl_sync(~0u, rows.end[0], 0)};
  }

  /// The thread's rows' keys, counted from the first of key tile `i`.
  __device__ __forceinline__ RowKeys rows_in(std::int32_t i) const {
    const std::int32_t first = walk.first_key(i), limit = walk.limit(i);
    RowKeys keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      keys.begin[r] = rows.begin[r] - first;
      keys.end[r] = min(rows.end[r], limit) - first;
    }
    return keys;
  }

  /// Weights of key tile `i` from its scores.
  __device__ __forceinline__ float2 weigh(ScoreFragment<W>& score, std::int32_t i) {
    float scale = op.sm_scale * kLog2e;
    if (op.variant.soft_cap > 0.f) {
      cap_scores<W::kKeys>(score, op.sm_scale, op.variant.soft_cap);
      scale = 1.f;
    }
    if (!walk.is_inside(i, warp_common)) mask<W::kKeys>(score, rows_in(i));
    return softmax.weigh<W::kKeys>(score, scale);
  }

  /// Returns the stage of the values of key tile `i`, fit for a product; none may be under way.
  /// `count` tiles came before.
  __device__ __forceinline__ int wait_for_values(OutputFragment<W>& out, std::int32_t i,
                                                 std::uint32_t count) {
    const KeyPosition at(count);
    ptx::mbarrier_wait(ptx::shared_address(&s.v_ready[at.stage]), at.parity);
    if (s.not_finite[at.stage]) {
      const std::int32_t first = walk.first_key(i);
      repair_values<W>(s, at.stage, item.any.begin - first,
                       min(item.any.end, walk.limit(i)) - first, rows_in(i), out);
    }
    return at.stage;
  }

  __device__ __forceinline__ int wait_for_keys(std::uint32_t count) {
    const KeyPosition at(count);
    ptx::mbarrier_wait(ptx::shared_address(&s.k_full[at.stage]), at.parity);
    return at.stage;
  }

  /// Of what the tensor cores read.
  __device__ __forceinline__ void release(std::uint64_t& empty) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  /// Of the item, which every thread read, and of its queries.
  __device__ __forceinline__ void release_item() const {
    ptx::mbarrier_arrive(ptx::shared_address(&s.q_empty[query_stage]));
  }

  /// Runs the item's key tiles, of which there is one at least; `count` of all items' came before.
  /// While the softmax of one tile runs, the tensor cores have the outputs of the tile before it,
  /// and the other warpgroup's products.
  __device__ __forceinline__ void run(OutputFragment<W>& out, std::uint32_t count) {
    const std::uint32_t q = ptx::shared_address(s.q[query_stage]) + group * (64 * 128);
    const std::int32_t tiles = walk.count();
    ScoreFragment<W> score;
    WeightFragment<W> weight;
    const int stage = wait_for_keys(count);
    ptx::wgmma_fence();
    issue_scores<W>(score, q, ptx::shared_address(s.k[stage][0]));
    ptx::wgmma_wait<0>();
    ptx::pin(score);
    release(s.k_empty[stage]);
    if (tiles == 1) release_item();
    weigh(score, 0);
    pack_weights<W>(weight, score);
#pragma unroll 1
    for (std::int32_t i = 1; i < tiles; ++i) {
      const int stage = wait_for_keys(++count);
      const int before = wait_for_values(out, i - 1, count - 1);
      ptx::wgmma_fence();
      issue_scores<W>(score, q, ptx::shared_address(s.k[stage][0]));
      issue_outputs<W>(out, weight, ptx::shared_address(s.v[before][0]));
      ptx::wgmma_wait<1>();
      ptx::pin(score);
      release(s.k_empty[stage]);
      if (i == tiles - 1) release_item();
      const float2 factor = weigh(score, i);
      ptx::wgmma_wait<0>();
      pin_outputs<W>(out);
      release(s.v_empty[before]);
      scale_outputs(out, factor);
      pack_weights<W>(weight, score);
    }
    const int last = wait_for_values(out, tiles - 1, count);
    ptx::wgmma_fence();
    issue_outputs<W>(out, weight, ptx::shared_address(s.v[last][0]));
    ptx::wgmma_wait<0>();
    pin_outputs<W>(out);
    release(s.v_empty[last]);
  }

  __device__ __forceinline__ void scale_outputs(OutputFragment<W>& out, float2 factor) const {
    if (!__any_sync(~0u, factor.x != 1.f || factor.y != 1.f)) return;
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < W::kColumns / 2; ++i) {
        out[part][i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
      }
    }
  }

  /// Writes the thread's rows; where nothing is visible zeros and -inf. The head's sink joins the
  /// denominator here and only here.
  __device__ __forceinline__ void store(const OutputFragment<W>& out) const {
    const std::int32_t head = item.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_quad(softmax.sum[r]);
      const bool exists = first_row + 8 * r < item.tile.num_rows;
      const std::int64_t row = std::int64_t{item.tile.query_row} + first_row + 8 * r;
      const bool empty = sum == 0.f;
      float denominator = sum;
      if (op.sinks != nullptr) {
        denominator += exp2_approx(__ldg(op.sinks + head) * kLog2e - softmax.max[r]);
      }
      store_row(out, r, exists, row * op.out_row_stride + head * op.out_head_stride,
                empty ? 0.f : 1.f / denominator);
      if (exists && op.lse != nullptr && lane % 4 == 0) {
        op.lse[head * op.lse_head_stride + row * op.lse_row_stride] =
            empty ? -INFINITY : (softmax.max[r] + log2f(sum)) * kLn2;
      }
    }
  }

  /// Run by whole warps, also for rows that do not exist.
  __device__ __forceinline__ void store_row(const OutputFragment<W>& out, int r, bool exists,
                                            std::int64_t at, float factor) const {
    const int c = lane % 4;
#pragma unroll
    for (int j = 0; j < W::kV / 8; j += 4) {
      const float* o = out[8 * j / W::kColumns] + 4 * (j % (W::kColumns / 8)) + 2 * r;
      if (op.out_type == ElementType::f32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t to = at + 8 * (j + i) + 2 * c;
          if (!exists || 8 * (j + i) >= op.v_dim) continue;
          *reinterpret_cast<float2*>(static_cast<float*>(op.out) + to) =
              float2{o[4 * i] * factor, o[4 * i + 1] * factor};
        }
        continue;
      }
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack<typename W::T>(o[4 * i] * factor, o[4 * i + 1] * factor);
      }
      transpose_in_quad(words);
      // Now 8 neighbouring channels of a block of its own are in each lane.
      if (!exists || 8 * (j + c) >= op.v_dim) continue;
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(op.out) + at + 8 * (j + c)) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }
};

/// Run by both computing warpgroups.
template <typename W>
__device__ void attend_items(const PrefillParams& op, SharedMemory<W>& s) {
  std::uint32_t count = 0;
  for (std::uint32_t turn = 0;; ++turn) {
    const RingPosition<W::kQueryStages> at(turn);
    ptx::mbarrier_wait(ptx::shared_address(&s.q_full[at.stage]), at.parity);
    if (s.item(at.stage).head < 0) break;
    Attention<W> attention(op, s, at.stage);
    OutputFragment<W> out = {};
    if (attention.walk.count() > 0) {
      attention.run(out, count);
      count += attention.walk.count();
    } else {
      attention.release_item();
    }
    attention.store(out);
  }
}

}  // namespace fovea::cuda::prefill
