// The schedule: which keys of which request each group of blocks reads. It is computed on the
// device from the lengths, and its size depends on the number of groups alone, so that a CUDA graph
// can be replayed with other lengths.
//
// A job is one request's row tiles of one group (1 or 2 of them) over all its keys, in units of
// kKeyTile keys; a job without keys is one unit, which writes zeros. The units of all jobs, in
// order of requests, are cut into equal ranges, one per group; of a batch so small that a group's
// blocks would not get a unit each, fewer groups take part. Only a group's first and last job can
// be shared with other groups, so two partial results per group are enough. Where one job per group
// leaves no group with much more than an equal share, nothing is cut and nothing to be merged.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/mla_decode/params.h"

namespace fovea::cuda::mla {

constexpr int kKeyTile = 64;  ///< M of a warpgroup product: keys stand on the M side.

/// One group's range. 48 bytes, read as three 16-byte words.
struct alignas(16) GroupRange {
  std::int32_t request;         ///< Of the first job.
  std::int32_t job;             ///< First job among its request's.
  std::int32_t tile;            ///< First key tile of the first job, among those it sees.
  std::int32_t units;           ///< Units of the range.
  std::int32_t job_first_unit;  ///< Unit number of the first job's start.
  std::int32_t total_units;     ///< Of the whole batch.
  std::int32_t seq_len;         ///< Of the first job's request, as the three below.
  std::int32_t query_begin;
  std::int32_t query_len;
  std::int32_t active_groups;  ///< Groups that have units: the first ones.
  std::int32_t padding[2];
};

struct ScheduleShape {
  std::int32_t num_groups;
  std::int32_t num_heads;
  std::int32_t rows_per_job;  ///< rows * row_tiles_per_group
  std::int32_t splits_per_group;
  std::int32_t window_left;
};

__host__ __device__ inline std::int32_t jobs_of(std::int32_t query_len, const ScheduleShape& s) {
  return (query_len * s.num_heads + s.rows_per_job - 1) / s.rows_per_job;
}

/// The first key tile that some query token of the request sees.
__host__ __device__ inline std::int32_t first_tile_of(std::int32_t seq_len, std::int32_t query_len,
                                                      std::int32_t window_left) {
  const std::int32_t key = seq_len - query_len - window_left;
  return window_left < 0 || key <= 0 ? 0 : key / kKeyTile;
}

/// Key tiles of a job.
__host__ __device__ inline std::int32_t units_of(std::int32_t seq_len, std::int32_t query_len,
                                                 std::int32_t window_left) {
  if (seq_len <= 0) return 1;
  return (seq_len + kKeyTile - 1) / kKeyTile - first_tile_of(seq_len, query_len, window_left);
}

/// First unit of group `g`: g * total / groups.
__host__ __device__ inline std::int32_t range_begin(std::int32_t g, std::int32_t total,
                                                    std::int32_t groups) {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(g) * total / groups);
}

/// The group whose range holds `unit`, given no more groups than units.
__host__ __device__ inline std::int32_t group_of(std::int32_t unit, std::int32_t total,
                                                 std::int32_t groups) {
  return static_cast<std::int32_t>((static_cast<std::int64_t>(unit + 1) * groups - 1) / total);
}

constexpr int kPlanThreads = 1024;

/// Inclusive sum over the block of one value a thread; `scratch` holds 32 values.
__device__ inline std::int32_t block_inclusive_sum(std::int32_t value, std::int32_t* scratch) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const std::int32_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    std::int32_t sum = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    scratch[lane] = sum;
  }
  __syncthreads();
  if (warp > 0) value += scratch[warp - 1];
  __syncthreads();
  return value;
}

/// One block of kPlanThreads threads. Also clears the arrival counters.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(ScheduleShape shape, std::int32_t num_requests,
                const std::int32_t* __restrict__ query_start_loc,
                const std::int32_t* __restrict__ seq_lens, GroupRange* __restrict__ ranges,
                std::uint32_t* __restrict__ counters, std::int32_t num_counters) {
  __shared__ std::int32_t scratch[32];
  __shared__ std::int32_t total_units, total_jobs, longest_job;
  const int thread = threadIdx.x;
  if (thread == 0) longest_job = 0;
  for (int i = thread; i < num_counters; i += kPlanThreads) counters[i] = 0;

  const auto jobs = [&](std::int32_t r) {
    return r < num_requests ? jobs_of(query_start_loc[r + 1] - query_start_loc[r], shape) : 0;
  };
  const auto job_units_of = [&](std::int32_t r) {
    return units_of(seq_lens[r], query_start_loc[r + 1] - query_start_loc[r], shape.window_left);
  };
  const auto units = [&](std::int32_t r) {
    return r < num_requests ? jobs(r) * job_units_of(r) : 0;
  };
  std::int32_t my_units = 0, my_jobs = 0, my_longest = 0;
  for (std::int32_t r = thread; r < num_requests; r += kPlanThreads) {
    my_units += units(r);
    my_jobs += jobs(r);
    if (jobs(r) > 0) my_longest = max(my_longest, job_units_of(r));
  }
  const std::int32_t unit_sum = block_inclusive_sum(my_units, scratch);
  const std::int32_t job_sum = block_inclusive_sum(my_jobs, scratch);
  atomicMax(&longest_job, my_longest);
  if (thread == kPlanThreads - 1) {
    total_units = unit_sum;
    total_jobs = job_sum;
  }
  __syncthreads();
  const std::int32_t total = total_units;
  const bool one_job_each =
      total_jobs <= shape.num_groups &&
      static_cast<std::int64_t>(longest_job) * shape.num_groups * 16 <= std::int64_t{17} * total;

  const std::int32_t groups =
      one_job_each
          ? total_jobs
          : min(shape.num_groups, (total + shape.splits_per_group - 1) / shape.splits_per_group);
  for (int g = groups + thread; g < shape.num_groups; g += kPlanThreads) ranges[g] = GroupRange{};
  std::int32_t units_before = 0, jobs_before = 0;
  for (std::int32_t first = 0; first < num_requests; first += kPlanThreads) {
    const std::int32_t r = first + thread;
    const std::int32_t end = units_before + block_inclusive_sum(units(r), scratch);
    const std::int32_t jobs_end = jobs_before + block_inclusive_sum(jobs(r), scratch);
    const std::int32_t begin = end - units(r);
    const auto write = [&](std::int32_t g, std::int32_t unit, std::int32_t count) {
      const std::int32_t job_units = job_units_of(r);
      GroupRange range{};
      range.request = r;
      range.job = (unit - begin) / job_units;
      range.tile = (unit - begin) % job_units;
      range.units = count;
      range.job_first_unit = begin + range.job * job_units;
      range.total_units = total;
      range.seq_len = seq_lens[r];
      range.query_begin = query_start_loc[r];
      range.query_len = query_start_loc[r + 1] - query_start_loc[r];
      range.active_groups = groups;
      ranges[g] = range;
    };
    if (jobs(r) > 0 && one_job_each) {
      const std::int32_t job_units = job_units_of(r);
      for (std::int32_t i = 0; i < jobs(r); ++i) {
        write(jobs_end - jobs(r) + i, begin + i * job_units, job_units);
      }
    } else if (jobs(r) > 0) {
      // The groups whose ranges begin in [begin, end).
      for (std::int32_t g = group_of(begin, total, groups); g < groups; ++g) {
        const std::int32_t unit = range_begin(g, total, groups);
        if (unit >= end) break;
        if (unit < begin) continue;
        write(g, unit, range_begin(g + 1, total, groups) - unit);
      }
    }
    // The last thread's sums are the chunk's; every thread needs them as the next chunk's start.
    if (thread == kPlanThreads - 1) {
      total_units = end;
      total_jobs = jobs_end;
    }
    __syncthreads();
    units_before = total_units;
    jobs_before = total_jobs;
    __syncthreads();
  }
  __threadfence();  // The kernel after this one may read the schedule before it waits for this one.
}

}  // namespace fovea::cuda::mla
