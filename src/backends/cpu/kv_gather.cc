#include <algorithm>

#include "backends/cpu/ops.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {

void kv_gather(const Kernels& kernels, const OpContext& ctx, const KvGatherParams& params) {
  const std::int64_t width = params.out.shape[1];
  const auto gather_rows = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t request_begin = 0;  // Its first row of `out`.
    for (std::size_t i = 0; i < params.seq_lens.size() && request_begin < end; ++i) {
      const std::int64_t request_end = request_begin + params.seq_lens[i];
      const std::int64_t first = std::max(begin, request_begin);
      const std::int64_t last = std::min(end, request_end);
      if (first < last) {
        const PagedRows rows(*params.cache, params.block_table, static_cast<std::int64_t>(i));
        const std::int64_t to_position = params.starts[i] - request_begin;
        rows.for_each({first + to_position, last + to_position},
                      [&](std::int64_t position, const Row& row) {
                        copy_row(kernels, row, width, row_of(params.out, {position - to_position}));
                      });
      }
      request_begin = request_end;
    }
  };
  for_row_ranges(*ctx.pool, params.out.shape[0], width, gather_rows);
}

}  // namespace fovea::cpu
