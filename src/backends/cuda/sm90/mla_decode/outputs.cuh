// The output warpgroups: O += V P, outputs, and the merge of split keys.
#pragma once

#include "backends/cuda/sm90/mla_decode/block.cuh"

namespace fovea::cuda::mla {

/// O^T of one warpgroup: 4 tiles of [64 channels, rows].
template <int kRows>
using OutputFragment = float[kChunksPerOutput][kRows / 2];

/// O^T [256 channels, rows] += V^T [256, 64] P^T [64, rows] over the block's key tiles. Leaves the
/// last message to be read by the caller.
template <typename T, int kRows>
__device__ void accumulate_tiles(const Job& job, SharedMemory<kRows>& s,
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
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile) {
    ptx::mbarrier_wait(ptx::shared_address(&s.p_full), message & 1);
    ++message;
    if (s.rescale) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(&s.message[0][8 * j + 2 * c]);
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
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
    ring.advance(kChunks);
  }
  ptx::mbarrier_wait(ptx::shared_address(&s.p_full), message & 1);
  ++message;
}

/// Where a thread's four values of chunk `chunk`, column block `j` lie in a whole result
/// [512 x rows]: 128 threads' float4 side by side.
template <int kRows>
__device__ __forceinline__ int fragment_index(int chunk, int j, int thread) {
  return (chunk * (kRows / 8) + j) * 128 + thread;
}

/// Writes normalised outputs straight from the fragments.
template <typename T, int kRows>
__device__ void store_output(const KernelParams& k, const Job& job, const SharedMemory<kRows>& s,
                             const OutputFragment<kRows>& out) {
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

/// One float4 of a merged result: 2 channels (8 apart) x 2 rows.
struct MergedValue {
  float4 value;  ///< Sum of weight * value.
  float2 max;    ///< Of the two rows.
  float2 sum;
};

/// Merges `count` results: stats(i) gives (max, max), (sum, sum) of the two rows, value(i) the
/// float4. kFlight results are asked for at once.
template <int kFlight, typename Stats, typename Value>
__device__ __forceinline__ MergedValue merge_values(int count, Stats stats, Value value) {
  MergedValue merged{{0.f, 0.f, 0.f, 0.f}, {-INFINITY, -INFINITY}, {0.f, 0.f}};
  for (int first = 0; first < count; first += kFlight) {
    float4 v[kFlight];
    float2 m[kFlight], l[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      m[i] = float2{-INFINITY, -INFINITY};
      l[i] = float2{0.f, 0.f};
      v[i] = float4{0.f, 0.f, 0.f, 0.f};
      if (first + i < count) {
        stats(first + i, m[i], l[i]);
        v[i] = value(first + i);
      }
    }
    float2 max = merged.max;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      max.x = m[i].x > max.x || m[i].x != m[i].x ? m[i].x : max.x;
      max.y = m[i].y > max.y || m[i].y != m[i].y ? m[i].y : max.y;
    }
    const float old0 = merge_weight(merged.max.x, max.x), old1 = merge_weight(merged.max.y, max.y);
    merged.max = max;
    merged.sum = float2{merged.sum.x * old0, merged.sum.y * old1};
    merged.value = float4{merged.value.x * old0, merged.value.y * old1, merged.value.z * old0,
                          merged.value.w * old1};
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const float w0 = merge_weight(m[i].x, max.x), w1 = merge_weight(m[i].y, max.y);
      // An empty result weighs nothing, whatever its values are.
      if (m[i].x != -INFINITY) {
        merged.sum.x += w0 * l[i].x;
        merged.value.x += w0 * v[i].x;
        merged.value.z += w0 * v[i].z;
      }
      if (m[i].y != -INFINITY) {
        merged.sum.y += w1 * l[i].y;
        merged.value.y += w1 * v[i].y;
        merged.value.w += w1 * v[i].w;
      }
    }
  }
  return merged;
}

/// Which part of a result the float4 at `index` is.
template <int kRows>
struct FragmentPlace {
  int channel, column;
  __device__ explicit FragmentPlace(int index) {
    const int thread = index % 128;
    const int tile = index / 128;
    channel = tile / (kRows / 8) * 64 + thread / 32 * 16 + thread % 32 / 4;
    column = tile % (kRows / 8) * 8 + thread % 4 * 2;
  }
};

/// Writes a merged float4; the thread that holds channel 0 also writes the rows' lse.
template <int kRows>
__device__ __forceinline__ void store_merged(const KernelParams& k, const Job& job,
                                             const FragmentPlace<kRows>& place,
                                             const MergedValue& m) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int row = place.column + b;
    if (row >= job.num_rows) continue;
    const float sum = b == 0 ? m.sum.x : m.sum.y;
    const float inverse = inverse_sum(k.op, job, row, b == 0 ? m.max.x : m.max.y, sum);
    const std::int64_t to = out_offset(k.op, job, row) + place.channel;
    store_element(k.op, to, (b == 0 ? m.value.x : m.value.y) * inverse);
    store_element(k.op, to + 8, (b == 0 ? m.value.z : m.value.w) * inverse);
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

/// Called by the output warpgroups once the block's slice of the job's partial result is written:
/// the last block to come merges that slice of all of them.
template <int kRows>
__device__ void merge_if_last(const KernelParams& k, const Job& job, const JobWalk& walk,
                              const Partials<kRows>& partials, SharedMemory<kRows>& s) {
  const std::int32_t total = walk.total_units();
  const std::int32_t groups = walk.groups();
  const std::int32_t first = group_of(job.first_unit, total, groups);
  const std::int32_t last = group_of(job.first_unit + job.num_units - 1, total, groups);
  // The first group may have begun with another job; the others begin inside this one.
  const std::int32_t first_slot =
      2 * first + (range_begin(first, total, groups) < job.first_unit ? 1 : 0);
  const auto slot = [&](int piece) { return piece == 0 ? first_slot : 2 * (first + piece); };
  const int pieces = last - first + 1;

  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  std::uint32_t* counter = k.counters + partials.slice(first_slot);
  if (threadIdx.x == 0) {
    const bool is_last = ptx::count_arrival(counter) == static_cast<std::uint32_t>(pieces - 1);
    if (is_last) *counter = 0;  // Ready for the next launch.
    s.last_arriver = is_last;
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  if (!s.last_arriver) return;

  constexpr int kValues = kLatent / 4 * kRows;
  const int slice = kValues / k.geometry.splits_per_group;
  const int begin = partials.split * slice;
  for (int index = begin + threadIdx.x; index < begin + slice; index += kOutputThreads) {
    const FragmentPlace<kRows> place(index);
    const MergedValue merged = merge_values<8>(
        pieces,
        [&](int i, float2& max, float2& sum) {
          max = __ldcg(reinterpret_cast<const float2*>(partials.max(slot(i)) + place.column));
          sum = __ldcg(reinterpret_cast<const float2*>(partials.sum(slot(i)) + place.column));
        },
        [&](int i) { return __ldcg(partials.out(slot(i)) + index); });
    store_merged(k, job, place, merged);
  }
}

/// The end of a job for a block without cluster merge.
template <typename T, int kRows>
__device__ void finish_alone(const KernelParams& k, const Job& job, const JobWalk& walk,
                             const Partials<kRows>& partials, SharedMemory<kRows>& s,
                             const OutputFragment<kRows>& out) {
  if (job.whole) {
    if (job.num_rows > 0) store_output<T, kRows>(k, job, s, out);
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
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  if (!job.whole) merge_if_last(k, job, walk, partials, s);
}

/// What a cluster's merge notes of its blocks' results, behind the block's own output in the ring.
template <int kRows>
struct MergeScratch {
  float max[kMaxSplits][kRows], sum[kMaxSplits][kRows], weight[kMaxSplits][kRows];
  float merged_max[kRows];
};

/// The end of a job for a cluster whose blocks share its keys: each block merges one slice of the
/// blocks' results through distributed shared memory.
template <typename T, int kRows>
__device__ void finish_in_cluster(const KernelParams& k, const Job& job, const JobWalk& walk,
                                  const Partials<kRows>& partials, SharedMemory<kRows>& s,
                                  const OutputFragment<kRows>& out) {
  const int splits = k.geometry.splits_per_group;
  const int thread = threadIdx.x % 128;
  const int first_chunk = threadIdx.x / 128 * kChunksPerOutput;
  ptx::named_barrier(kOutputBarrier, kOutputThreads);  // Both warpgroups have read their chunks.
  auto* own = reinterpret_cast<float4*>(s.ring);
#pragma unroll
  for (int i = 0; i < kChunksPerOutput; ++i) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      own[fragment_index<kRows>(first_chunk + i, j, thread)] =
          float4{out[i][4 * j], out[i][4 * j + 1], out[i][4 * j + 2], out[i][4 * j + 3]};
    }
  }
  ptx::fence_async_proxy();  // The ring's next chunks come after these.
  ptx::cluster_arrive();
  ptx::cluster_wait();

  constexpr int kValues = kLatent / 4 * kRows;
  const int slice = kValues / splits;
  const int end = (partials.split + 1) * slice;
  const std::uint32_t values = ptx::shared_address(s.ring);
  const std::uint32_t message = ptx::shared_address(s.message);
  // Each block begins with itself, so that not all read from one.
  const auto source_of = [&](int i) {
    const int source = partials.split + i;
    return source < splits ? source : source - splits;
  };
  const auto rank_of = [&](int source) {
    return source * k.geometry.row_tiles_per_group + partials.row_tile;
  };
  float4 value[kMaxSplits];
  const auto load_values = [&](int index) {
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      if (i < splits && index < end) {
        value[i] = ptx::load_cluster_float4(
            ptx::cluster_address(values + index * 16, rank_of(source_of(i))));
      }
    }
  };
  int index = partials.split * slice + threadIdx.x;
  load_values(index);
  auto& scratch = *reinterpret_cast<MergeScratch<kRows>*>(own + kValues);
  static_assert(sizeof(s.ring) >= kValues * 16 + sizeof(scratch));
  for (int i = threadIdx.x; i < splits * kRows; i += kOutputThreads) {
    const int source = i / kRows, row = i % kRows;
    const std::uint32_t at = ptx::cluster_address(message + row * 4, rank_of(source));
    scratch.max[source][row] = ptx::load_cluster_float(at);
    scratch.sum[source][row] = ptx::load_cluster_float(at + kRows * 4);
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  for (int i = threadIdx.x; i < splits * kRows; i += kOutputThreads) {
    const int source = i / kRows, row = i % kRows;
    float max = -INFINITY;
    for (int other = 0; other < splits; ++other) {
      const float m = scratch.max[other][row];
      max = m > max || m != m ? m : max;
    }
    scratch.weight[source][row] = merge_weight(scratch.max[source][row], max);
    if (source == 0) scratch.merged_max[row] = max;
  }
  ptx::named_barrier(kOutputBarrier, kOutputThreads);
  while (index < end) {
    const FragmentPlace<kRows> place(index);
    MergedValue merged{};
    merged.max = *reinterpret_cast<const float2*>(&scratch.merged_max[place.column]);
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      if (i >= splits) break;
      const int source = source_of(i);
      const float2 weight =
          *reinterpret_cast<const float2*>(&scratch.weight[source][place.column]);
      const float2 sum = *reinterpret_cast<const float2*>(&scratch.sum[source][place.column]);
      merged.sum.x += weight.x * sum.x;
      merged.sum.y += weight.y * sum.y;
      merged.value.x += weight.x * value[i].x;
      merged.value.y += weight.y * value[i].y;
      merged.value.z += weight.x * value[i].z;
      merged.value.w += weight.y * value[i].w;
    }
    if (job.whole) {
      store_merged(k, job, place, merged);
    } else {
      partials.out(job.slot)[index] = merged.value;
      if (place.channel % 64 == 0) {  // One of the threads that hold these rows.
        *reinterpret_cast<float2*>(partials.max(job.slot) + place.column) = merged.max;
        *reinterpret_cast<float2*>(partials.sum(job.slot) + place.column) = merged.sum;
      }
    }
    index += kOutputThreads;
    load_values(index);
  }
  ptx::cluster_arrive();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.p_empty));
  if (!job.whole) merge_if_last(k, job, walk, partials, s);
  ptx::cluster_wait();
}

}  // namespace fovea::cuda::mla
