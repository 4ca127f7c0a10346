// The kernel that computes the schedule.
#pragma once

#include "backends/cuda/sm90/split_kv/schedule.cuh"

namespace fovea::cuda::split_kv {

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
static __global__ void __launch_bounds__(kPlanThreads, 1)
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
    return r < num_requests ? shape.jobs(query_start_loc[r + 1] - query_start_loc[r]) : 0;
  };
  const auto job_units_of = [&](std::int32_t r) {
    return shape.units(seq_lens[r], query_start_loc[r + 1] - query_start_loc[r]);
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

  const std::int32_t groups = one_job_each ? total_jobs : min(shape.num_groups, total);
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
      const JobPieces pieces(range.job_first_unit, job_units, total, groups);
      range.first_slot = pieces.first_slot;
      range.num_pieces = pieces.count;
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

}  // namespace fovea::cuda::split_kv
