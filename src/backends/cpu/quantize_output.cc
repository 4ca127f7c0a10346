#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"
#include "ops/output_rows.h"

namespace fovea::cpu {

void quantize_output(const Kernels& kernels, const OpContext& ctx,
                     const QuantizeOutputParams& params) {
  const OutputRows rows(params);
  const auto quantize_rows = [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float values[OutputRows::kMaxGroup];
    for (std::int64_t t = begin; t < end; ++t) {
      if (t >= params.x.shape[0]) {
        rows.clear(t);
        continue;
      }
      const Row x = row_of(params.x, {t});
      for (std::int64_t g = 0; g < rows.num_groups(); ++g) {
        const std::int64_t count = rows.group_size(g);
        load_row(kernels, x.from(rows.group_begin(g)), count, values);
        rows.write_group(t, g, {values, static_cast<std::size_t>(count)});
      }
    }
  };
  for_row_ranges(*ctx.pool, params.output.out.shape[0], params.x.shape[1], quantize_rows);
  rows.clear_padding();
}

}  // namespace fovea::cpu
