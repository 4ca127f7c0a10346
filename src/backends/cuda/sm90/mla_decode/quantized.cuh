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
                               QuantizedMemory<Format>& s, Places& place) {
  using Memory = QuantizedMemory<Format>;
  constexpr int kPieces = Format::kRowBytes / 8;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const std::int32_t box_rows = k.box_rows;
  const std::int32_t* blocks = k.op.block_table + request * k.op.block_table_stride;
  const auto* cache = static_cast<const std::uint8_t*>(k.op.cache);
  const auto row_of = [&](std::int32_t key) {
    const auto at = static_cast<std::uint32_t>(key);
    return cache + __ldg(blocks + k.block_size.quotient(at)) * k.op.cache_block_stride +
           std::int64_t{k.block_size.remainder(at)} * k.op.cache_row_stride;
  };
  const std::int32_t whole_steps = job.tile_begin + Steps<Memory::kStepTiles>(job).singles;
  for (std::int32_t tile = job.tile_begin; tile < job.tile_end; ++tile, ++place.tiles) {
    const std::int32_t first = tile * kKeyTile;
    const std::int32_t keys = min(kKeyTile, job.seq_len - first);
    const std::uint32_t slot = place.tiles % Memory::kSlots;
    const std::uint32_t full = ptx::shared_address(&s.full[place.steps % Memory::kArrivals]);
    // The barrier of a step counts as many tiles as a step may have.
    const bool single = tile < whole_steps;
    const int arrivals = single ? Memory::kStepTiles : 1;
    if (single || (tile - whole_steps) % Memory::kStepTiles == Memory::kStepTiles - 1) {
      ++place.steps;
    }
    const std::uint32_t to = ptx::shared_address(s.ring[slot]);
    const auto wait_for_slot = [&] {
      ptx::wait_for_previous_kernel();
      ptx::mbarrier_wait(ptx::shared_address(&s.empty[slot]),
                         (place.tiles / Memory::kSlots & 1) ^ 1);
    };
    if (k.bulk_rows) {
      // Asked for before the slot is free, so that the table's answer is here by then.
      const int boxes = (keys + box_rows - 1) >> (__ffs(box_rows) - 1);
      const std::uint8_t* row = lane < boxes ? row_of(first + lane * box_rows) : nullptr;
      wait_for_slot();
      const std::uint32_t box_bytes = box_rows * Format::kRowBytes;
      if (lane == 0) {
        for (int i = 1; i < arrivals; ++i) ptx::mbarrier_arrive(full);
        ptx::mbarrier_arrive_expect(full, boxes * box_bytes);
      }
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
      for (int i = 1; i < arrivals; ++i) ptx::mbarrier_arrive(full);
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
  for (;;) {
    ptx::named_barrier(kComputeBarrier, kComputeThreads);  // The job before is done with.
    if (kept(threadIdx.x) == 0) {  // A condition that is not to be kept through products.
      s.before.add(s.steps);
      s.has_job = walk.next(s.handover.job);
      if (s.has_job) {
        s.handover.begin(job, walk);
        ptx::wait_for_previous_kernel();
        announce(k, s.handover);
        s.steps = Steps<Memory::kStepTiles>(job);
        s.set_visible(visible_keys(k, job));
      }
    }
    ptx::named_barrier(kComputeBarrier, kComputeThreads);
    if (!s.has_job) return;
    ptx::wait_for_previous_kernel();
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
    // The team's own steps, whatever the jobs.
    for (std::int32_t step = (at.team + kTeams - s.before.steps % kTeams) % kTeams;
         step < s.steps.count; step += kTeams) {
      const std::uint32_t turn = s.before.steps + step;
      typename TeamScores<Format>::Queries queries;
#pragma unroll
      for (int n = 0; !Format::kIntegers && n < scores.kAhead; ++n) {
        scores.load_queries(n, queries[n]);
      }
      ptx::mbarrier_wait(ptx::shared_address(&s.full[turn % Memory::kArrivals]),
                         turn / Memory::kArrivals % 2);
      if (scores.step(step, queries)) scale_outputs(s.factor[at.team], at.c, out);
      const int half = s.half(step);
#pragma unroll
      for (int t = 0; t < Memory::kStepTiles; ++t) {
        if (t > 0 && t >= s.steps.tiles_of(step)) break;
        const std::uint32_t slot = s.slot(step, t);
        values.add(at, s.ring[slot], s.p[at.team][half][t], s.ratio[at.team][half][t], out);
        ptx::fence_async_proxy();  // What the thread read here bulk copies overwrite.
        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[slot]));
      }
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
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]),
                         Memory::kStepTiles * (k.bulk_rows ? 1 : 128));
    }
#pragma unroll 1
    for (int i = 0; i < Memory::kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), kTeamThreads);
    }
    s.handover.init(kTeamThreads);
    ptx::mbarrier_init_fence();
    s.before = {};
    s.steps = {};
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
    if (loader > 0 && k.bulk_rows) return;
    JobWalk walk(k, kQuantizedRows);
    Job job;
    Places place;
    while (walk.next(job)) load_quantized<Format>(k, job, walk.request(), s, place);
  }
}

}  // namespace fovea::cuda::mla
