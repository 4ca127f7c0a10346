// MLA decode over quantised rows. Raw rows travel; codes become f16 fragments in registers on their
// way into the tensor cores, once for S and once for O, so that no dequantised tile exists. Queries
// are f16, each row scaled by a power of two. A key's scales enter its scores and its weights in P.
#pragma once

#include <new>

#include "backends/cuda/sm90/mla_decode/load.cuh"
#include "backends/cuda/sm90/mla_decode/quantized_outputs.cuh"
#include "backends/cuda/sm90/mla_decode/quantized_scores.cuh"

namespace fovea::cuda::mla {

/// Brings the block's key tiles. Boxes of rows that are contiguous and 16-byte aligned come by bulk
/// copies, all others in pieces of 8 bytes from all lanes of the loading warps.
template <typename Format>
__device__ void load_quantized(const KernelParams& k, const Job& job, std::int32_t request,
                               QuantizedMemory<Format>& s,
                               std::uint32_t& place) {
  using Memory = QuantizedMemory<Format>;
  constexpr int kPieces = Format::kRowBytes / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const std::int32_t box_rows = k.box_rows;
  const auto block_size = static_cast<std::uint32_t>(k.op.block_size);
  const std::int32_t* blocks = k.op.block_table + request * k.op.block_table_stride;
  const auto* cache = static_cast<const std::uint8_t*>(k.op.cache);
  const auto row_of = [&](std::int32_t key) {
    const auto at = static_cast<std::uint32_t>(key);
    return cache + __ldg(blocks + at / block_size) * k.op.cache_block_stride +
           static_cast<std::int64_t>(at % block_size) * k.op.cache_row_stride;
  };
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile, ++place) {
    const std::int32_t first = tile * kKeyTile;
    const std::int32_t keys = min(kKeyTile, job.seq_len - first);
    const std::uint32_t slot = place % Memory::kSlots;
    const std::uint32_t full = ptx::shared_address(&s.full[place % Memory::kArrivals]);
    const std::uint32_t to = ptx::shared_address(s.ring[slot]);
    const auto wait_for_slot = [&] {
      ptx::wait_for_previous_kernel();
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[slot]), (place / Memory::kSlots & 1) ^ 1);
    };
    if (k.bulk_rows) {
      // Asked for before the slot is free, so that the table's answer is here by then.
      const int boxes = (keys + box_rows - 1) / box_rows;
      const std::uint8_t* row = lane < boxes ? row_of(first + lane * box_rows) : nullptr;
      wait_for_slot();
      const std::uint32_t box_bytes = box_rows * Format::kRowBytes;
      if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * box_bytes);
      __syncwarp();
      const auto policy = ptx::make_l2_policy(k.geometry.row_tiles_per_group == 1
                                                  ? ptx::L2Policy::evict_first
                                                  : ptx::L2Policy::evict_normal);
#pragma unroll 1
      for (int box = lane; box < boxes; box += 32) {
        if (box >= 32) row = row_of(first + box * box_rows);
        ptx::load_bytes(to + box * box_bytes, row, box_bytes, full, policy);
      }
    } else {
      wait_for_slot();
#pragma unroll 1
      for (std::int32_t i = thread; i < keys * kPieces; i += 128) {
        const std::int32_t key = i / kPieces, piece = i % kPieces;
        ptx::copy_8_bytes(to + i * 8, row_of(first + key) + piece * 8);
      }
      ptx::arrive_after_copies(full);
    }
  }
}

/// What the teams do.
template <typename Format>
__device__ __forceinline__ void compute(const KernelParams& k, QuantizedMemory<Format>& s) {
  const Job& job = s.handover.job;
  auto& walk = *reinterpret_cast<JobWalk*>(s.walk);
  using Memory = QuantizedMemory<Format>;
  ptx::wait_for_previous_kernel();
  for (;;) {
    ptx::named_barrier(kComputeBarrier, kComputeThreads);  // The job before is done with.
    if (threadIdx.x == 0) {
      s.tiles_before += job.tile_end - job.tile_begin;
      s.has_job = walk.next(s.handover.job);
      if (s.has_job) {
        s.handover.begin(job, walk);
        announce(k, s.handover);
        s.set_visible(visible_keys(k, job));
      }
    }
    ptx::named_barrier(kComputeBarrier, kComputeThreads);
    if (!s.has_job) return;
    load_query_scaled<Format>(k, job, s);
    ptx::named_barrier(kComputeBarrier, kComputeThreads);

    TeamOutputs out;
#pragma unroll
    for (int i = 0; i < kTeamTiles; ++i) {
#pragma unroll
      for (int e = 0; e < kQuantizedRows / 2; ++e) out[i][e] = 0.f;
    }
    const TeamPlace at;
    TeamScores<Format> scores(k, at, s);
    const TeamValues<Format> values(at);
    const std::uint32_t begin = s.tiles_before;
    const std::uint32_t end = begin + (job.tile_end - job.tile_begin);
    // The team's own places, whatever the jobs.
    for (std::uint32_t place = begin + (at.team + kTeams - begin % kTeams) % kTeams; place < end;
         place += kTeams) {
      const std::uint32_t slot = place % Memory::kSlots;
      const int turn = place / kTeams % 2;
      std::uint8_t* raw = s.ring[slot];
      std::uint8_t* p = s.p[at.team][turn];
      __half* ratio = s.ratio[at.team][turn];
      typename TeamScores<Format>::Queries queries;
#pragma unroll
      for (int n = 0; n < scores.kAhead; ++n) scores.load_queries(n, queries[n]);
      ptx::mbarrier_wait(ptx::shared_address(&s.full[place % Memory::kArrivals]),
                         place / Memory::kArrivals % 2);
      const std::int32_t tile = job.tile_begin + static_cast<std::int32_t>(place - begin);
      if (scores.tile(raw, queries, tile, p, ratio)) {
        scale_outputs(s.factor[at.team], at.c, out);
      }
      values.add(raw, p, ratio, out);
      __syncwarp();
      if (at.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[slot]));
    }
    scores.publish();
    OutputFragment<kQuantizedRows> merged;
    merge_teams<Format>(k, at, s, out, merged);
    if (threadIdx.x < kOutputThreads) {
      finish<kQuantizedRows, QuantizedOrder<Format>>(k, s.handover, merged);
    }
  }
}

template <typename Format>
__global__ void __launch_bounds__(kQuantizedThreads, 1)
    mla_decode_quantized_kernel(const __grid_constant__ KernelParams k) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  using Memory = QuantizedMemory<Format>;
  auto& s = *reinterpret_cast<Memory*>(shared_bytes);

  // As in mla_decode_kernel: what is older than the kernel before may be read before the wait.
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < Memory::kArrivals; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), k.bulk_rows ? 1 : 128);
    }
#pragma unroll 1
    for (int i = 0; i < Memory::kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), kTeamWarps);
    }
    s.handover.init(kTeamThreads);
    ptx::mbarrier_init_fence();
    s.tiles_before = 0;
    s.handover.job.tile_begin = s.handover.job.tile_end = 0;
    new (s.walk) JobWalk(k, kQuantizedRows);
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kComputeThreads / 32) {
    ptx::take_registers<kComputeRegisters>();
    compute<Format>(k, s);
  } else {
    ptx::give_registers<kLoadRegisters>();
    const int loader = warp - kComputeThreads / 32;
    if (loader == 1) {
      ptx::wait_for_previous_kernel();
      ptx::let_next_kernel_start();
      clear_unused_rows(k.op, blockIdx.x, gridDim.x);
    }
    JobWalk walk(k, kQuantizedRows);
    Job job;
    std::uint32_t place = 0;
    while (walk.next(job)) {
      if (loader == 0 || !k.bulk_rows) {
        load_quantized<Format>(k, job, walk.request(), s, place);
      }
    }
  }
}

}  // namespace fovea::cuda::mla
