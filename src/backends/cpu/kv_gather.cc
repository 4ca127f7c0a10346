#include <algorithm>
#include <cstring>

#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {

namespace {

/// Rows of the cache, in its format, to rows of the output.
class RowCopier {
 public:
  RowCopier(const Kernels& kernels, const KvFormat& format, const TensorView& out)
      : kernels_(kernels), format_(format), heads_(kernels, format, format.num_heads), out_(out) {}

  void copy(std::byte* from, std::int64_t row) const {
    if (out_.dtype == DType::u8) {
      std::memcpy(out_.ptr<std::uint8_t>({row, 0}), from,
                  static_cast<std::size_t>(format_.row_bytes()));
      return;
    }
    const Row to = row_of(out_, {row});
    if (format_.scales == KvScales::none) {
      copy_row(kernels_, Row{from, format_.dtype, 1}, format_.row_elements, to);
    } else {
      alignas(64) float values[KvFormat::kMaxScaledHead + kMaxLanes];
      for (std::int64_t h = 0; h < format_.num_heads; ++h) {
        heads_.load(from, h, values);
        store_row(kernels_, values, 1.f, heads_.elements(), to.from(h * heads_.elements()));
      }
    }
  }

 private:
  const Kernels& kernels_;
  const KvFormat& format_;
  StoredHeads heads_;
  const TensorView& out_;
};

}  // namespace

void kv_gather(const Kernels& kernels, const OpContext& ctx, const KvGatherParams& params) {
  const std::int64_t width = params.out.shape[1];
  const RowCopier copier(kernels, params.cache->format(), params.out);
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
                      [&](std::int64_t position, std::byte* row) {
                        copier.copy(row, position - to_position);
                      });
      }
      request_begin = request_end;
    }
  };
  for_row_ranges(*ctx.pool, params.out.shape[0], width, gather_rows);
}

}  // namespace fovea::cpu
