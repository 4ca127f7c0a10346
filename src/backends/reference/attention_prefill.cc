#include <algorithm>
#include <optional>

#include "backends/reference/attend.h"
#include "backends/reference/cached_rows.h"
#include "backends/reference/kernels.h"
#include "backends/reference/rows.h"
#include "plan/extents.h"

namespace fovea::reference {
namespace {

std::int64_t row_scratch(const AttentionPrefillParams& p) {
  return std::max(p.q.shape[2], p.out.shape[2]);
}

}  // namespace

std::int64_t attention_prefill_scratch(const OpContext&, const AttentionPrefillParams& p) {
  constexpr std::int64_t kElement = sizeof(double);
  return Workspace::rounded(p.q.shape[2] * kElement) +
         Workspace::rounded(p.out.shape[2] * kElement) +
         Workspace::rounded(row_scratch(p) * kElement) +
         Workspace::rounded(p.schedule->max_seq_len * kElement) +
         (p.paged.k_cache ? PagedKvReader::scratch(p.paged) : 0);
}

void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& p) {
  const PrefillSchedule& schedule = *p.schedule;
  const bool is_paged = p.paged.k_cache != nullptr;
  const std::int64_t group = p.q.shape[1] / (is_paged ? p.paged.num_kv_heads : p.k.shape[1]);

  WorkspaceScope scope(*ctx.workspace);
  double* const q = scope.take<double>(p.q.shape[2]);
  double* const out = scope.take<double>(p.out.shape[2]);
  const AttendScratch scratch{.scores = scope.take<double>(schedule.max_seq_len),
                              .row = scope.take<double>(row_scratch(p))};
  std::optional<PagedKvReader> paged;
  if (is_paged) paged.emplace(p.paged, scope);

  for (const PrefillTile& tile : schedule.tiles) {
    const auto r = static_cast<std::size_t>(tile.request);
    const std::int64_t first_query = schedule.cu_seqlens_q[r];
    const std::int64_t first_own_key = schedule.cu_seqlens_k[r];
    const SequenceExtent extent = extent_of(schedule, tile.request);
    for (std::int64_t n = 0; n < p.q.shape[1]; ++n) {
      const std::int64_t kv_head = n / group;
      // Keys before it are paged; the others are rows of k and v.
      const std::int64_t first_row = !is_paged ? 0
                                     : p.k     ? extent.num_keys - extent.num_queries
                                               : extent.num_keys;
      const std::int64_t first_key = is_paged ? first_query - first_row : first_own_key;
      const auto load_key = [&](std::int64_t key, double* row) {  // [k | k_pe]
        if (key < first_row) return paged->load_key(tile.request, kv_head, key, row);
        load(row_of(p.k, first_key + key, kv_head), row);
        if (p.k_pe) load(row_of(p.k_pe, first_key + key), row + p.k.shape[2]);
      };
      const auto load_value = [&](std::int64_t key, double* row) {
        if (key < first_row) return paged->load_value(tile.request, kv_head, key, row);
        load(row_of(p.v, first_key + key, kv_head), row);
      };
      const double sink = p.sinks ? static_cast<double>(*p.sinks.ptr<float>({n})) : kNoSink;
      for (std::int64_t i = tile.query_begin; i < tile.query_end; ++i) {
        const std::int64_t t = first_query + i;
        load(row_of(p.q, t, n), q);
        const auto sees = [&](std::int64_t key) { return fovea::sees(p.variant, i, key, extent); };
        const QueryRow query{.q = q,
                             .qk_dim = p.q.shape[2],
                             .v_dim = p.out.shape[2],
                             .keys = visible_keys(p.variant, i, extent),
                             .sm_scale = static_cast<double>(p.sm_scale),
                             .soft_cap = static_cast<double>(p.variant.soft_cap),
                             .sink = sink};
        const double lse = attend(query, sees, load_key, load_value, scratch, out);
        store(out, row_of(p.out, t, n));
        if (p.lse) *p.lse.ptr<float>({n, t}) = static_cast<float>(lse);
      }
    }
  }
}

}  // namespace fovea::reference
