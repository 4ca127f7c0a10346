#include "ops/checks.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

void validate(const KvGatherParams& p) {
  const char* op = kKvGather.name;
  const Argument out{op, "out"};
  FOVEA_CHECK(p.starts.size() == p.seq_lens.size(), invalid_argument,
              "{}: starts has {} entries; it must have as many as seq_lens, {}", op,
              p.starts.size(), p.seq_lens.size());
  FOVEA_CHECK(p.cache != nullptr, invalid_argument, "{}: cache is null; it must be a PagedKvCache",
              op);
  check_cache(op, p.cache, p.cache->format().row_elements, "row_elements");
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < p.seq_lens.size(); ++i) {
    FOVEA_CHECK(p.starts[i] >= 0, invalid_argument, "{}: starts[{}] is {}; it must not be negative",
                op, i, p.starts[i]);
    FOVEA_CHECK(p.seq_lens[i] >= 0, invalid_argument,
                "{}: seq_lens[{}] is {}; it must not be negative", op, i, p.seq_lens[i]);
    rows += p.seq_lens[i];
  }
  const KvFormat& format = p.cache->format();
  if (p.out.dtype == DType::u8) {
    check_view(out, p.out, {{"sum(seq_lens)", rows}, {"row_bytes", format.row_bytes()}});
  } else {
    check_view(out, p.out, {{"sum(seq_lens)", rows}, {"row_elements", format.row_elements}});
    check_compute_dtype(out, p.out);
  }
  check_unit_inner_stride(out, p.out);

  check_output(out, p.out);
  check_disjoint(out, p.out, "cache", bytes_of_rows(*p.cache));
  check_block_table(op, p.block_table, static_cast<std::int64_t>(p.seq_lens.size()));
  for (std::size_t i = 0; i < p.seq_lens.size(); ++i) {
    if (p.seq_lens[i] == 0) continue;
    check_block_row(op, p.block_table, *p.cache, static_cast<std::int64_t>(i), p.starts[i],
                    std::int64_t{p.starts[i]} + p.seq_lens[i]);
  }
}

}  // namespace

void kv_gather(const OpContext& ctx, const KvGatherParams& params) {
  check_devices(ctx, kKvGather.name, {{"cache", params.cache}, {"out", params.out}});
  validate(params);
  if (params.out.numel() == 0) return;
  run(ctx, select(ctx, kKvGather, params), params);
}

}  // namespace fovea
