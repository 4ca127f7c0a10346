#include "backends/cuda/index_checks.h"

#include <algorithm>

#include "backends/cuda/index_checks.cuh"
#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/upload.h"
#include "variants/visibility.h"

namespace fovea::cuda {
namespace {

/// What a request may be at most.
struct Bounds {
  const std::int32_t* seq_lens;
  const std::int32_t* table;
  std::int64_t table_stride;
  std::int64_t table_width;
  std::int64_t block_size;
  std::int64_t num_blocks;
  AttentionVariant variant;
  bool has_tree;
};

/// A block per request. lens[r] comes as the most that it may be, queries[r] as its query tokens.
__global__ void check_lengths_kernel(Bounds bounds, const std::int32_t* queries,
                                     std::int32_t* lens, DeviceFault* fault) {
  const std::int64_t r = blockIdx.x;
  const std::int64_t keys = bounds.seq_lens[r];
  const std::int64_t most = lens[r];
  __shared__ int fits;
  if (threadIdx.x == 0) {
    // All tokens of a draft tree are keys of their request.
    const std::int64_t least = bounds.has_tree && keys != 0 ? queries[r] : 0;
    fits = is_in_range(fault, DeviceFault::Argument::seq_lens, r, keys, least, most + 1);
  }
  __syncthreads();
  if (fits) {
    const SequenceExtent extent{.num_queries = queries[r], .num_keys = keys};
    const KeyInterval seen = visible_to_any(bounds.variant, {0, extent.num_queries}, extent);
    const std::int64_t first = seen.empty() ? 0 : seen.begin / bounds.block_size;
    const std::int64_t end =
        seen.empty() ? 0 : (seen.end + bounds.block_size - 1) / bounds.block_size;
    for (std::int64_t b = first + threadIdx.x; b < end; b += kThreads) {
      const std::int64_t block = bounds.table[r * bounds.table_stride + b];
      if (!is_in_range(fault, DeviceFault::Argument::block_table, r * bounds.table_width + b, block,
                       0, bounds.num_blocks)) {
        fits = 0;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) lens[r] = fits ? static_cast<std::int32_t>(keys) : 0;
}

}  // namespace

void check_lengths(const OpContext& ctx, const DecodeSchedule& schedule,
                   const BlockTableView& blocks, const PagedKvCache& cache,
                   const AttentionVariant& variant, std::int32_t* lens) {
  const std::int64_t requests = std::ssize(schedule.seq_lens);
  Upload image(lens, stream_of(ctx));
  for (const std::int32_t most : schedule.seq_lens) image.put(most);
  const std::int32_t* queries = image.next();
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    image.put(schedule.query_start_loc[r + 1] - schedule.query_start_loc[r]);
  }
  image.send();
  launch(ctx, requests, check_lengths_kernel,
         Bounds{.seq_lens = schedule.device_seq_lens,
                .table = blocks.data,
                .table_stride = blocks.stride,
                .table_width = blocks.width,
                .block_size = cache.block_size(),
                .num_blocks = cache.num_blocks(),
                .variant = variant,
                .has_tree = !schedule.draft_tree.empty()},
         queries, lens, ctx.device_fault);
}

}  // namespace fovea::cuda
