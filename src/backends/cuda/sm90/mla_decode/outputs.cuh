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

/// Where a thread's four values of chunk `chunk`, column block `j` lie in a whole result
/// [512 x rows]: 128 threads' float4 side by side.
template <int kRows>
__device__ __forceinline__ int fragment_index(int chunk, int j, int thread) {
  return (chunk * (kRows / 8) + j) * 128 + thread;
}

/// Which part of a result the float4 at `index` is.
template <int kRows, typename Order>
struct FragmentPlace {
  int channel, column;
  bool first_channels;  ///< One of the threads that hold these rows.
  __device__ explicit FragmentPlace(int index) {
    const int thread = index % 128;
    const int tile = index / 128;
    channel = Order::channel(tile / (kRows / 8), thread / 32, thread % 32 / 4);
    column = tile % (kRows / 8) * 8 + thread % 4 * 2;
    first_channels = thread / 4 == 0;
  }
};

/// Writes a merged float4; the thread that holds channel 0 also writes the rows' lse.
template <int kRows, typename Order>
__device__ __forceinline__ void store_merged(const KernelParams& k, const Job& job,
                                             const FragmentPlace<kRows, Order>& place,
                                             const MergedValue& m) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int row = place.column + b;
    if (row >= job.num_rows) continue;
    const float sum = b == 0 ? m.sum.x : m.sum.y;
    const float inverse = inverse_sum(k.op, job, row, b == 0 ? m.max.x : m.max.y, sum);
    const std::int64_t to = out_offset(k.op, job, row) + place.channel;
    store_element(k.op, to, (b == 0 ? m.value.x : m.value.y) * inverse);
    store_element(k.op, to + Order::kStep, (b == 0 ? m.value.z : m.value.w) * inverse);
    if (place.channel == 0) store_lse(k.op, job, row, b == 0 ? m.max.x : m.max.y, sum);
  }
}

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

/// Merges slice `split` of `splits` of `count` results. stats(i) gives a result's maxima, which its
/// sums follow, out(i) its values; store(index, place, merged) takes what comes out. Two float4 a
/// thread are on their way at once where a slice has so many.
template <int kRows, typename Order, typename Stats, typename Out, typename Store>
__device__ __forceinline__ void merge_slice(int split, int splits, int count, Stats stats, Out out,
                                            Store store) {
  constexpr int kAtOnce = kRows == 64 ? 2 : 1;
  const int slice = kLatent / 4 * kRows / splits;
  const int begin = split * slice;
  for (int first = begin + threadIdx.x; first < begin + slice; first += kAtOnce * kOutputThreads) {
    MergedValue merged[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int index = first + n * kOutputThreads;
      const FragmentPlace<kRows, Order> place(index);
      merged[n] = split_kv::merge_values<Order::kFlight>(
          count,
          [&](int i, float2& max, float2& sum) {
            const float* at = stats(i) + place.column;
            max = __ldcg(reinterpret_cast<const float2*>(at));
            sum = __ldcg(reinterpret_cast<const float2*>(at + kRows));
          },
          [&](int i) { return __ldcg(out(i) + index); });
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int index = first + n * kOutputThreads;
      store(index, FragmentPlace<kRows, Order>(index), merged[n]);
    }
  }
}

/// Called by the output warpgroups once the block's slice of the job's partial result is written:
/// the last block to come merges that slice of all of them.
template <int kRows, typename Order>
__device__ void merge_if_last(const KernelParams& k, const Job& job, const JobPieces& pieces,
                              const Partials<kRows>& partials, Handover<kRows>& s) {
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  std::uint32_t* counter = k.counters + partials.slice(pieces.first_slot);
  if (threadIdx.x == 0) {
    const bool is_last =
        ptx::count_arrival(counter) == static_cast<std::uint32_t>(pieces.count - 1);
    if (is_last) *counter = 0;  // Ready for the next launch.
    s.last_arriver = is_last;
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  if (!s.last_arriver) return;

  merge_slice<kRows, Order>(
      partials.split, k.geometry.splits_per_group, pieces.count,
      [&](int i) { return partials.max(pieces.slot(i)); },
      [&](int i) { return partials.out(pieces.slot(i)); },
      [&](int, const FragmentPlace<kRows, Order>& place, const MergedValue& merged) {
        store_merged(k, job, place, merged);
      });
}

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

/// The end of a job for a block without cluster merge.
template <int kRows, typename Order>
__device__ void finish_alone(const KernelParams& k, const JobWalk& walk,
                             const Partials<kRows>& partials, Handover<kRows>& s,
                             const OutputFragment<kRows>& out) {
  const Job& job = s.job;
  if (job.whole) {
    if (job.num_rows > 0) store_output<kRows>(Order{}, k, job, s, out);
  } else {
    const int thread = threadIdx.x % 128;
    const int first_chunk = threadIdx.x / 128 * kChunksPerOutput;
    float4* to = partials.out(job.slot);
#pragma unroll
    for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        to[fragment_index<kRows>(first_chunk + i, j, thread)] =
            float4{out[i][4 * j], out[i][4 * j + 1], out[i][4 * j + 2], out[i][4 * j + 3]};
      }
    }
    for (int row = threadIdx.x; row < kRows; row += kOutputThreads) {
      partials.max(job.slot)[row] = s.message[0][row];
      partials.sum(job.slot)[row] = s.message[1][row];
    }
  }
  ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  if (job.whole) return;
  const JobPieces pieces(job.first_unit, job.num_units, walk.range());
  merge_if_last<kRows, Order>(k, job, pieces, partials, s);
}

/// The end of a job for a cluster whose blocks share its keys: each block merges one slice of the
/// blocks' results. They travel through L2, which takes half the time of distributed shared memory.
/// `turn` counts the block's jobs: results alternate between two places, and a block that writes
/// one of them again has seen all others finish reading it.
template <int kRows, typename Order>
__device__ void finish_in_cluster(const KernelParams& k, const JobWalk& walk,
                                  const Partials<kRows>& partials, Handover<kRows>& s,
                                  const OutputFragment<kRows>& out, std::uint32_t turn) {
  const Job& job = s.job;
  constexpr int kValues = kLatent / 4 * kRows;
  const int splits = k.geometry.splits_per_group;
  const int row_tiles = k.geometry.row_tiles_per_group;
  const int thread = threadIdx.x % 128;
  const int first_chunk = threadIdx.x / 128 * kChunksPerOutput;
  const std::int64_t turn_block = (turn & 1) * static_cast<std::int64_t>(gridDim.x);
  // Block of split i, less that of split 0, is i * row_tiles.
  const std::int64_t own_block = turn_block + blockIdx.x;
  const std::int64_t first_block = own_block - partials.split * row_tiles;
  const auto out_of = [&](std::int64_t block) {
    return reinterpret_cast<float4*>(k.exchange_out) + block * kValues;
  };
  const auto stats_of = [&](std::int64_t block) { return k.exchange_stats + block * (2 * kRows); };

  float4* own = out_of(own_block);
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      __stcg(own + fragment_index<kRows>(first_chunk + i, j, thread),
             float4{out[i][4 * j], out[i][4 * j + 1], out[i][4 * j + 2], out[i][4 * j + 3]});
    }
  }
  if (threadIdx.x < 2 * kRows) {
    __stcg(stats_of(own_block) + threadIdx.x, (&s.message[0][0])[threadIdx.x]);
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  const JobPieces pieces(job.first_unit, job.num_units, walk.range());
  const std::uint32_t exchanged = ptx::shared_address(&s.exchanged);
  if (threadIdx.x < splits) {
    ptx::mbarrier_arrive_cluster(
        ptx::cluster_address(exchanged, threadIdx.x * row_tiles + partials.row_tile));
  }
  ptx::mbarrier_wait_cluster(exchanged, turn & 1);

  merge_slice<kRows, Order>(
      partials.split, splits, splits, [&](int i) { return stats_of(first_block + i * row_tiles); },
      [&](int i) { return out_of(first_block + i * row_tiles); },
      [&](int index, const FragmentPlace<kRows, Order>& place, const MergedValue& merged) {
        if (job.whole) {
          store_merged(k, job, place, merged);
          return;
        }
        __stcg(partials.out(job.slot) + index, merged.value);
        if (place.first_channels) {
          __stcg(reinterpret_cast<float2*>(partials.max(job.slot) + place.column), merged.max);
          __stcg(reinterpret_cast<float2*>(partials.sum(job.slot) + place.column), merged.sum);
        }
      });
  if (!job.whole) merge_if_last<kRows, Order>(k, job, pieces, partials, s);
}

}  // namespace fovea::cuda::mla
