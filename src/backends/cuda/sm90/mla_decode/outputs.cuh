// The output warpgroups: O += V P, outputs, and the merge of split keys.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// O^T of one warpgroup: 4 tiles of [64 channels, rows].
template <int kRows>
using OutputFragment = float[kChunksPerOutput][kRows / 2];

/// O^T [256 channels, rows] += V^T [256, 64] P^T [64, rows] over `tiles` key tiles. Leaves the
/// last message to be read by the caller.
template <typename T, int kRows>
__device__ void accumulate_tiles(std::int32_t tiles, SharedMemory<kRows>& s,
                                 RingPosition<SharedMemory<kRows>::kSlots>& ring,
                                 std::uint32_t& message, OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int c = lane % 4;
  const std::uint64_t p_operand = ptx::swizzled_operand(ptx::shared_address(s.p));
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) out[i][e] = 0.f;
  }
  for (; tiles > 0; --tiles) {
    ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
    ++message;
    if (s.handover.rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 factor =
            *reinterpret_cast<const float2*>(&s.handover.message[0][8 * j + 2 * c]);
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          out[i][4 * j] *= factor.x;
          out[i][4 * j + 1] *= factor.y;
          out[i][4 * j + 2] *= factor.x;
          out[i][4 * j + 3] *= factor.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    const auto tile_ring = ring.uniform();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
      const auto at = tile_ring.chunk(1 + 2 * i + warpgroup);
      const std::uint64_t v_operand = ptx::swizzled_operand(ptx::shared_address(s.ring[at.slot]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // 16 keys: 16 rows of 128 bytes.
        ptx::wgmma<T, ptx::AMajor::m, kRows>(out[i], v_operand + step * (16 * 128 >> 4),
                                             p_operand + step * 2, true);
      }
      ptx::wgmma_commit();
    }
    const auto release = [&](int i) {
      if (lane == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.chunk(1 + 2 * i + warpgroup).slot]));
      }
    };
    ptx::wgmma_wait<3>();
    release(0);
    ptx::wgmma_wait<2>();
    release(1);
    ptx::wgmma_wait<1>();
    release(2);
    ptx::wgmma_wait<0>();
    release(3);
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) ptx::pin(out[i]);
    ptx::mbarrier_arrive(ptx::shared_address(&s.handover.p_empty));
    ring.advance(kChunks);
  }
  ptx::mbarrier_wait(ptx::shared_address(&s.handover.p_full), message & 1);
  ++message;
}

/// Which channels a thread's fragments are: of chunk `chunk`, rows g and g + 8 of warp `warp`'s 16
/// are channels channel() and channel() + kStep.
struct DenseOrder {
  static constexpr int kStep = 8;
  static constexpr int kFlight = 8;  ///< Results that a merge asks for at once.
  static __device__ int channel(int chunk, int warp, int g) { return chunk * 64 + warp * 16 + g; }
};

/// float4 of each result that a merge asks for at once: as many as there are registers for.
template <typename Order>
constexpr int kValuesAtOnce = 1;
template <>
constexpr int kValuesAtOnce<DenseOrder> = 2;

/// A thread's four values of two rows and two channels as merges take them: the first row's are x
/// and z. `d` points at them in a fragment.
template <typename Order>
__device__ __forceinline__ float4 two_by_two(const float* d) {
  return float4{d[0], d[1], d[2], d[3]};
}

/// Where a thread's four values of chunk `chunk`, column block `j` lie in a whole result
/// [512 x rows]: 128 threads' float4 side by side.
template <int kRows>
__device__ __forceinline__ int fragment_index(int chunk, int j, int thread) {
  return (chunk * (kRows / 8) + j) * 128 + thread;
}

/// Which part of a result the float4 at `index` is: two rows, whose maxima and sums lie at `column`
/// and behind it.
template <int kRows, typename Order>
struct FragmentPlace {
  static constexpr int kPeriod = kRows / 8 * 128;  ///< float4 so far apart are of the same rows.
  using Lanes = split_kv::LanesOfRows<8, 4>;
  int channel, column;
  bool first_channels;  ///< One of the threads that hold these rows.
  __device__ explicit FragmentPlace(int index) {
    const int thread = index % 128;
    const int tile = index / 128;
    channel = Order::channel(tile / (kRows / 8), thread / 32, thread % 32 / 4);
    column = tile % (kRows / 8) * 8 + thread % 4 * 2;
    first_channels = thread / 4 == 0;
  }
  __device__ int row(int i) const { return column + i; }
};

/// Addresses of a job's partial results for one block: its row tile and its slice of each result
/// (all of it without clusters).
template <int kRows>
struct Partials {
  const KernelParams& k;
  int row_tile, split;

  __device__ std::int64_t part(std::int32_t slot) const {
    return static_cast<std::int64_t>(slot) * k.geometry.row_tiles_per_group + row_tile;
  }
  __device__ std::int64_t slice(std::int32_t slot) const {
    return part(slot) * k.geometry.splits_per_group + split;
  }
  __device__ float4* out(std::int32_t slot) const {
    return reinterpret_cast<float4*>(k.partial_out) + part(slot) * (kLatent / 4 * kRows);
  }
  __device__ float* max(std::int32_t slot) const {
    return k.partial_stats + slice(slot) * (2 * kRows);
  }
  __device__ float* sum(std::int32_t slot) const { return max(slot) + kRows; }
};

/// Writes normalised outputs straight from the fragments.
template <int kRows>
__device__ void store_output(DenseOrder, const KernelParams& k, const Job& job,
                             const Handover<kRows>& s, const OutputFragment<kRows>& out) {
  constexpr int kBlocks = kRows / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int first_channel = threadIdx.x / 128 * kChunksPerOutput * 64 + thread / 32 * 16;
  const MlaDecodeParams& op = k.op;
  for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
    store_lse(op, job, row, s.message[0][row], s.message[1][row]);
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 sums = *reinterpret_cast<const float2*>(&s.message[1][8 * j + 2 * c]);
    const int column = 8 * j + 2 * c;
    const float inverse0 = inverse_sum(op, job, column, s.message[0][column], sums.x);
    const float inverse1 = inverse_sum(op, job, column + 1, s.message[0][column + 1], sums.y);
    if (op.out_type == ElementType::f32) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = 8 * j + 2 * c + b;
        if (row >= job.num_rows) continue;
        float* to = static_cast<float*>(op.out) + out_offset(op, job, row) + first_channel + g;
        const float inverse = b == 0 ? inverse0 : inverse1;
#pragma unroll
        for (int i = 0; i < kChunksPerOutput; ++i) {
          to[i * 64] = out[i][4 * j + b] * inverse;
          to[i * 64 + 8] = out[i][4 * j + 2 + b] * inverse;
        }
      }
      continue;
    }
    // A transposition across the warp brings a row's neighbouring channels together.
    const int row = 8 * j + g;
    const bool exists = row < job.num_rows;
    std::uint16_t* to = static_cast<std::uint16_t*>(op.out) +
                        (exists ? out_offset(op, job, row) : 0) + first_channel + 2 * c;
    const bool bf16 = op.out_type == ElementType::bf16;
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = out[i][4 * j + 2 * half] * inverse0;
        const float b = out[i][4 * j + 2 * half + 1] * inverse1;
        const std::uint32_t turned =
            ptx::transpose_matrix(bf16 ? pack<__nv_bfloat16>(a, b) : pack<__half>(a, b));
        if (exists) *reinterpret_cast<std::uint32_t*>(to + i * 64 + half * 8) = turned;
      }
    }
  }
}

/// Results of several blocks or groups: where the values of the i-th lie, and the maxima of the
/// block's slice, which its sums follow.
struct Results {
  const float4* out;
  const float* stats;
  int out_stride, stats_stride;  ///< Between places.
  int first, step;               ///< Places of the first result, and between results.
  int count;

  __device__ int place(int i) const { return i == 0 ? first : i * step; }
};

/// Rows of a merge and the float4 of them that one thread has: kValues, kStride apart.
template <int kRows, typename Order>
struct MergeShape {
  using Place = FragmentPlace<kRows, Order>;
  static constexpr int kValues = kValuesAtOnce<Order>;
  static constexpr int kStride =
      Place::kPeriod > kOutputThreads ? Place::kPeriod : kOutputThreads;
  using Merged = split_kv::MergedRows<kValues>;
};

/// Writes `existing` merged float4 from `index` on; the thread that holds channel 0 also writes the
/// rows' lse.
template <int kRows, typename Order>
__device__ __forceinline__ void store_merged(const KernelParams& k, const Job& job, int index,
                                             int existing,
                                             const typename MergeShape<kRows, Order>::Merged& m) {
  using Shape = MergeShape<kRows, Order>;
  const typename Shape::Place place(index);
#pragma unroll 1
  for (int b = 0; b < 2; ++b) {
    const int row = place.row(b);
    if (row >= job.num_rows) break;
    const float max = b == 0 ? m.max.x : m.max.y, sum = b == 0 ? m.sum.x : m.sum.y;
    const float inverse = inverse_sum(k.op, job, row, max, sum);
    const std::int64_t to = out_offset(k.op, job, row);
    if (place.channel == 0) store_lse(k.op, job, row, max, sum);
#pragma unroll
    for (int n = 0; n < Shape::kValues; ++n) {
      if (n >= existing) break;
      const float4& v = m.value[n];
      const std::int64_t at = to + typename Shape::Place(index + n * Shape::kStride).channel;
      store_element(k.op, at, (b == 0 ? v.x : v.y) * inverse);
      store_element(k.op, at + Order::kStep, (b == 0 ? v.z : v.w) * inverse);
    }
  }
}

/// Merges the block's slice of `results`: into the job's rows, or into the partial result at
/// `partial_slot` unless that is negative. `thread` is one of the output warpgroups'.
template <int kRows, typename Order>
__device__ __forceinline__ void merge_slice(const KernelParams& k, const Job& job,
                                            const Results& results,
                                            const Partials<kRows>& partials, int thread,
                                            std::int32_t partial_slot) {
  using Shape = MergeShape<kRows, Order>;
  const int slice = kLatent / 4 * kRows / k.geometry.splits_per_group;
  const int begin = partials.split * slice, end = begin + slice;
#pragma unroll 1
  for (int offset = thread; offset < Shape::kStride; offset += kOutputThreads) {
#pragma unroll 1
    for (int first = begin + offset; first < end; first += Shape::kValues * Shape::kStride) {
      const typename Shape::Place rows(first);
      const int existing = (end - first + Shape::kStride - 1) / Shape::kStride;
      const auto merged = split_kv::merge_rows<Order::kFlight, Shape::kValues, Shape::kStride,
                                              typename Shape::Place::Lanes>(
          results.count, existing,
          [&](int i, float2& max, float2& sum) {
            const float* at =
                results.stats + (results.place(i) * results.stats_stride + rows.column);
            max = __ldcg(reinterpret_cast<const float2*>(at));
            sum = __ldcg(reinterpret_cast<const float2*>(at + kRows));
          },
          [&](int i) { return results.out + (results.place(i) * results.out_stride + first); });
      if (partial_slot >= 0) {
        float4* to = partials.out(partial_slot) + first;
#pragma unroll
        for (int n = 0; n < Shape::kValues; ++n) {
          if (n < existing) __stcg(to + n * Shape::kStride, merged.value[n]);
        }
        if (rows.first_channels) {
          __stcg(reinterpret_cast<float2*>(partials.max(partial_slot) + rows.column), merged.max);
          __stcg(reinterpret_cast<float2*>(partials.sum(partial_slot) + rows.column), merged.sum);
        }
      } else {
        store_merged<kRows, Order>(k, job, first, existing, merged);
      }
    }
  }
}

/// Whether the block is the last of those that share a slice of the job. Called by the output
/// warpgroups once theirs is written.
template <int kRows>
__device__ __forceinline__ bool is_last_arriver(const KernelParams& k,
                                                const Partials<kRows>& partials,
                                                Handover<kRows>& s) {
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  if (threadIdx.x == 0) {
    std::uint32_t* counter = k.counters + partials.slice(s.pieces.first_slot);
    const bool is_last =
        ptx::count_arrival(counter) == static_cast<std::uint32_t>(s.pieces.count - 1);
    if (is_last) *counter = 0;  // Ready for the next launch.
    s.last_arriver = is_last;
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  return s.last_arriver;
}

/// The end of a job. Blocks of a cluster, which share its keys, merge one slice each of their
/// results. These travel through L2, which takes half the time of distributed shared memory. If
/// other groups share the job, the last block to come merges a slice of all of theirs.
/// Results alternate between two places, and a block that writes one of them again has seen all
/// others finish reading it. release() is called once the message has been read.
template <int kRows, typename Order, typename Release>
__device__ __forceinline__ void finish(const KernelParams& k, Handover<kRows>& s,
                                       const OutputFragment<kRows>& out, Release release) {
  const Job& job = s.job;
  constexpr int kValues = kLatent / 4 * kRows;
  int splits = k.geometry.splits_per_group, row_tiles = k.geometry.row_tiles_per_group;
  int thread = threadIdx.x;
  // What follows from these must not lie in registers through the products.
  asm volatile("" : "+r"(splits), "+r"(row_tiles), "+r"(thread));
  const bool alone = splits == 1;
  const int rank = blockIdx.x % (row_tiles * splits);
  const Partials<kRows> partials{k, rank % row_tiles, rank / row_tiles};
  if (alone && job.whole) {
    if (job.num_rows > 0) store_output<kRows>(Order{}, k, job, s, out);
    release();
    return;
  }
  const std::int64_t own_block = (s.turn & 1) * static_cast<std::int64_t>(gridDim.x) + blockIdx.x;
  float4* to = alone ? partials.out(job.slot)
                     : reinterpret_cast<float4*>(k.exchange_out) + own_block * kValues;
  float* stats = alone ? partials.max(job.slot) : k.exchange_stats + own_block * (2 * kRows);
  to += fragment_index<kRows>(thread / 128 * kChunksPerOutput, 0, thread % 128);
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      __stcg(to + fragment_index<kRows>(i, j, 0), two_by_two<Order>(&out[i][4 * j]));
    }
  }
  if (thread < 2 * kRows) __stcg(stats + thread, (&s.message[0][0])[thread]);
  Results results;
  if (!alone) {
    ptx::named_barrier(kOutputBarrier, kOutputThreads);
    const std::uint32_t exchanged = ptx::shared_address(&s.exchanged);
    if (thread < splits) {
      ptx::mbarrier_arrive_cluster(
          ptx::cluster_address(exchanged, thread * row_tiles + partials.row_tile));
    }
    const std::int64_t first_block = own_block - partials.split * row_tiles;
    results = {reinterpret_cast<const float4*>(k.exchange_out) + first_block * kValues,
               k.exchange_stats + first_block * (2 * kRows),
               kValues, 2 * kRows, 0, row_tiles, splits};
  }
  release();
  if (!alone) ptx::mbarrier_wait_cluster(ptx::shared_address(&s.exchanged), (s.turn & 1) ^ 1);
  bool last = alone;
#pragma unroll 1
  while (true) {
    if (last) {
      if (!is_last_arriver(k, partials, s)) return;
      const JobPieces& pieces = s.pieces;
      const std::int32_t slot = 2 * pieces.first_group;
      results = {partials.out(slot), partials.max(slot),
                 row_tiles * kValues, row_tiles * splits * (2 * kRows),
                 pieces.first_slot - slot, 2, pieces.count};
    }
    merge_slice<kRows, Order>(k, job, results, partials, thread,
                              last || job.whole ? -1 : job.slot);
    if (last || job.whole) return;
    last = true;
  }
}

}  // namespace fovea::cuda::mla
