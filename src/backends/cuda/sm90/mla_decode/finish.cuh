// The end of a job, once its output warpgroups have their sums: outputs, or partial results and
// their merge.
#pragma once

#include "backends/cuda/sm90/mla_decode/outputs.cuh"
#include "backends/cuda/sm90/split_kv/rendezvous.cuh"

namespace fovea::cuda::mla {

/// Order of a partial result [512 channels x rows]. Rows come in pairs, one behind the other; a
/// float4 holds two channels of a pair, the first row's in x and z.
constexpr int kPairValues = kLatent / 2;

template <int kRows, typename Order>
struct FragmentPlace {
  /// Where a thread's four values of chunk `chunk`, column block `j` lie.
  static __device__ int index(int chunk, int j, int thread) {
    return (j * 4 + thread % 4) * kPairValues + chunk * 32 + thread / 32 * 8 + thread % 32 / 4;
  }
  static __device__ float4 values(const float* d) { return float4{d[0], d[1], d[2], d[3]}; }
  static __device__ int row(int pair, int i) { return 2 * pair + i; }
  static __device__ int channel(int index) {
    return Order::channel(index % kPairValues / 32, index % 32 / 8, index % 8);
  }
};

/// float4 of each partial result that a thread asks for at once.
template <typename Order>
constexpr int kValuesAtOnce = 1;

/// A partial result: its values and, of a pair of rows, two maxima and two sums, which lie beside
/// those of all other results.
template <int kRows>
__device__ __forceinline__ float4* values_at(const KernelParams& k, std::int32_t place) {
  return k.partial_out + std::int64_t{place} * (kLatent / 4 * kRows);
}
__device__ __forceinline__ float4* stats_at(const KernelParams& k, std::int32_t place, int pair) {
  return k.partial_stats + (pair * 2 * k.geometry.num_groups * k.geometry.row_tiles_per_group +
                            place);
}

__device__ __forceinline__ split_kv::Rendezvous rendezvous_of(const KernelParams& k,
                                                              const Pieces& pieces) {
  return {k.rendezvous + pieces.first, pieces.count};
}

/// Announces that the block has begun its job. Run by one thread, when the kernel before has ended.
template <int kRows>
__device__ __forceinline__ void announce(const KernelParams& k, const Handover<kRows>& s) {
  if (!s.job.whole) rendezvous_of(k, s.pieces).begin();
}

__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return float2{split_kv::larger(a.x, b.x), split_kv::larger(a.y, b.y)};
}

/// A pair of rows of the merged result, as a warp has it after a round: what was before is to be
/// multiplied by `old`, and what piece 32 i + lane adds, by weight[i].
template <int kOwn>
struct PairWeights {
  float2 max, sum;  ///< Of the pieces so far.
  float2 old, weight[kOwn];

  __device__ __forceinline__ void reset() {
    max = {-INFINITY, -INFINITY};
    sum = {0.f, 0.f};
  }

  /// own[i]: maxima, then sums, of piece 32 i + lane. Run by a whole warp.
  __device__ __forceinline__ void add(const float4 (&own)[kOwn]) {
    float2 top = max;
#pragma unroll
    for (const float4& piece : own) top = larger(top, float2{piece.x, piece.y});
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      top = larger(top,
                   float2{__shfl_xor_sync(~0u, top.x, step), __shfl_xor_sync(~0u, top.y, step)});
    }
    float2 added{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      weight[i] = {split_kv::merge_weight(own[i].x, top.x),
                   split_kv::merge_weight(own[i].y, top.y)};
      added = {added.x + weight[i].x * own[i].z, added.y + weight[i].y * own[i].w};
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      added.x += __shfl_xor_sync(~0u, added.x, step);
      added.y += __shfl_xor_sync(~0u, added.y, step);
    }
    old = {split_kv::merge_weight(max.x, top.x), split_kv::merge_weight(max.y, top.y)};
    sum = {sum.x * old.x + added.x, sum.y * old.y + added.y};
    max = top;
  }
};

/// Lanes that share a value of a merge take pieces in turn. How many depends on the number of
/// pieces alone, so that sums have one order.
constexpr int kMaxTurns = 16;
template <int kRows>
__device__ __forceinline__ int turns_of_merge(int pieces) {
  if (pieces <= 16) return pieces <= 8 ? 1 : 2;
  // Values of 8 lanes are a line of memory. Small results are cut so finely that they have fewer.
  if (pieces <= 32 || kRows == 64) return 4;
  return pieces <= 64 ? 8 : kMaxTurns;
}

/// In a round a lane asks for values of kFlight pieces. It weighs so many of the warp's.
template <int kRows, typename Order>
constexpr int kOwnPieces = kRows == 64 ? 1 : Order::kFlight * kMaxTurns / 32;

/// Writes merged float4 at, at + step ... below `end`, all of one pair of rows. The thread that has
/// its first value also writes its rows' lse.
template <int kRows, typename Order, int kOwn>
__device__ __forceinline__ void store_merged(const KernelParams& k, const Job& job, int at, int end,
                                             int step,
                                             const float4 (&merged)[kValuesAtOnce<Order>],
                                             const PairWeights<kOwn>& weights) {
  using Place = FragmentPlace<kRows, Order>;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int row = Place::row(at / kPairValues, i);
    if (row >= job.num_rows) break;
    const float max = i == 0 ? weights.max.x : weights.max.y;
    const float sum = i == 0 ? weights.sum.x : weights.sum.y;
    const float inverse = inverse_sum(k, job, row, max, sum);
    const std::int64_t to = out_offset(k, job, row);
    if (at % kPairValues == 0) store_lse(k, job, row, max, sum);
#pragma unroll
    for (int n = 0; n < kValuesAtOnce<Order>; ++n) {
      if (at + n * step >= end) break;
      const float4& m = merged[n];
      store_elements<Order::kStep>(k.op, to + Place::channel(at + n * step),
                                   (i == 0 ? m.x : m.y) * inverse,
                                   (i == 0 ? m.z : m.w) * inverse);
    }
  }
}

/// Merges float4 [begin, end) of all pieces, which lie in one pair of rows, into the job's rows: at
/// most kValues * 32 / turns. `weights` are those of the pair, if `weighed`. Run by a warp.
template <int kRows, typename Order>
__device__ __forceinline__ void merge_values(const KernelParams& k, const Handover<kRows>& s,
                                             int begin, int end, int turns, int lane,
                                             bool weighed,
                                             PairWeights<kOwnPieces<kRows, Order>>& weights) {
  constexpr int kValues = kValuesAtOnce<Order>, kFlight = Order::kFlight;
  constexpr int kOwn = kOwnPieces<kRows, Order>;
  const int width = 32 / turns, turn = lane / width;
  const int pair = begin / kPairValues;
  const int at = begin + lane % width;
  const int round = kFlight * turns;
  weighed = weighed && s.pieces.count <= round;
  if (!weighed) weights.reset();
  float4 merged[kValues] = {};
#pragma unroll 1
  for (int base = 0; base < s.pieces.count; base += round) {
    const int pieces = min(s.pieces.count - base, round);
    float4 own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int piece = 32 * i + lane;
      own[i] = {-INFINITY, -INFINITY, 0.f, 0.f};
      if (!weighed && piece < pieces) {
        own[i] = __ldcg(stats_at(k, s.pieces.place(base + piece), pair));
      }
    }
    float4 v[kFlight][kValues];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int piece = turn + i * turns;
      const float4* values = values_at<kRows>(k, s.pieces.place(base + piece)) + at;
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        v[i][n] = float4{0.f, 0.f, 0.f, 0.f};
        if (piece < pieces && at + n * width < end) v[i][n] = __ldcg(values + n * width);
      }
    }
    if (!weighed) weights.add(own);
    const float2 old = base == 0 ? float2{0.f, 0.f} : weights.old;
#pragma unroll
    for (float4& m : merged) m = {m.x * old.x, m.y * old.y, m.z * old.x, m.w * old.y};
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int of_eight = i * 8 / 32 % kOwn, of_sixteen = i * 16 / 32 % kOwn;
      const float2& from = weights.weight[turns == 16 ? of_sixteen : turns == 8 ? of_eight : 0];
      const int lane_of_piece = (turn + i * turns) % 32;
      const float2 w{__shfl_sync(~0u, from.x, lane_of_piece),
                     __shfl_sync(~0u, from.y, lane_of_piece)};
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        float4& to = merged[n];
        to = {to.x + w.x * v[i][n].x, to.y + w.y * v[i][n].y, to.z + w.x * v[i][n].z,
              to.w + w.y * v[i][n].w};
      }
    }
  }
#pragma unroll 1
  for (int step = width; step < 32; step *= 2) {
#pragma unroll
    for (float4& m : merged) {
      m.x += __shfl_xor_sync(~0u, m.x, step);
      m.y += __shfl_xor_sync(~0u, m.y, step);
      m.z += __shfl_xor_sync(~0u, m.z, step);
      m.w += __shfl_xor_sync(~0u, m.w, step);
    }
  }
  if (turn == 0 && at < end) {
    store_merged<kRows, Order>(k, s.job, at, end, width, merged, weights);
  }
}

/// Merges the block's share of the job's partial results: equal parts of it are its warps'.
template <int kRows, typename Order>
__device__ __forceinline__ void merge_share(const KernelParams& k, const Handover<kRows>& s,
                                            int thread) {
  constexpr int kWarps = kOutputThreads / 32;
  constexpr int kSectors = kLatent / 8 * kRows;  // Of two float4: parts are whole ones.
  const int parts = s.share.count * kWarps;
  const int part = (kSectors + parts - 1) / parts * 2;
  const int begin = (s.share.index * kWarps + thread / 32) * part;
  const int end = min(begin + part, 2 * kSectors);
  const int turns = turns_of_merge<kRows>(s.pieces.count);
  PairWeights<kOwnPieces<kRows, Order>> weights;
  bool weighed = false;
#pragma unroll 1
  for (int first = begin; first < end;) {
    const int pair_end = (first / kPairValues + 1) * kPairValues;
    const int next = min(min(end, pair_end), first + 32 / turns * kValuesAtOnce<Order>);
    merge_values<kRows, Order>(k, s, first, next, turns, thread % 32, weighed, weights);
    weighed = next != pair_end;
    first = next;
  }
}

/// The end of a job. A block that has all of it writes its rows. Others leave partial results in
/// memory and merge a share of all of them. Run by the output warpgroups.
template <int kRows, typename Order>
__device__ __forceinline__ void finish(
    const KernelParams& k, Handover<kRows>& s, const OutputFragment<kRows>& out) {
  using Place = FragmentPlace<kRows, Order>;
  const Job& job = s.job;
  if (job.whole) {
    if (job.num_rows > 0) store_output<kRows>(Order{}, k, job, s, out);
    return;
  }
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // What follows must not lie in registers through products.
  auto rendezvous = rendezvous_of(k, s.pieces);
  const bool may_wait = rendezvous.all_have_begun();  // The answer comes while stores are issued.
  float4* to = values_at<kRows>(k, s.pieces.own) +
               Place::index(thread / 128 * kChunksPerOutput, 0, thread % 128);
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      __stcg(to + Place::index(i, j, 0), Place::values(&out[i][4 * j]));
    }
  }
  if (thread < kRows / 2) {
    const float2 max = *reinterpret_cast<const float2*>(&s.message[0][2 * thread]);
    const float2 sum = *reinterpret_cast<const float2*>(&s.message[1][2 * thread]);
    __stcg(stats_at(k, s.pieces.own, thread), float4{max.x, max.y, sum.x, sum.y});
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  std::uint64_t retired = 0;
  if (thread == 0) {
    s.share = rendezvous.finish(may_wait && job.last);
    if (s.share.count > 0) retired = rendezvous.retire();
  }
  __syncwarp();
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  if (s.share.count == 0) return;
  merge_share<kRows, Order>(k, s, thread);
  if (retired != 0) rendezvous.clear(retired, s.share);
}

}  // namespace fovea::cuda::mla
