#include <algorithm>

#include "backends/reference/attend.h"
#include "backends/reference/kernels.h"
#include "backends/reference/rows.h"

namespace fovea::reference {
namespace {

/// Partial results of requests whose keys are split: for each partial, query row and head the
/// output [L], then its lse.
struct Partials {
  double* data;
  std::int64_t max_query_len;
  std::int64_t heads;
  std::int64_t latent;

  static std::int64_t size(const MlaDecodeParams& p) {
    return std::int64_t{p.schedule->num_partials()} * p.schedule->max_query_len * p.q_latent.shape[1] *
           (p.q_latent.shape[2] + 1);
  }
  double* out(std::int64_t partial, std::int64_t query, std::int64_t head) const {
    return data + ((partial * max_query_len + query) * heads + head) * (latent + 1);
  }
  double& lse(std::int64_t partial, std::int64_t query, std::int64_t head) const {
    return out(partial, query, head)[latent];
  }
};

struct Scratch {
  double* q;    ///< [L + R]
  double* out;  ///< [L]
  AttendScratch attend;
  Partials partials;
};

std::int64_t longest_item(const DecodeSchedule& schedule) {
  std::int64_t longest = 0;
  for (const WorkItem& item : schedule.items) {
    longest = std::max<std::int64_t>(longest, item.kv_end - item.kv_begin);
  }
  return longest;
}

void write(const MlaDecodeParams& p, std::int64_t token, std::int64_t head, const double* out,
           double lse) {
  store(out, row_of(p.out, token, head));
  if (p.lse) *p.lse.ptr<float>({head, token}) = static_cast<float>(lse);
}

/// Every query row and head of the item's request against the item's keys.
void run_item(const MlaDecodeParams& p, const WorkItem& item, const Scratch& scratch) {
  const DecodeSchedule& schedule = *p.schedule;
  const PagedKvCache& cache = *p.cache;
  const std::int64_t latent = p.q_latent.shape[2];
  const std::int64_t row_elements = cache.format().row_elements;
  const auto r = static_cast<std::size_t>(item.request);
  const std::int64_t first_token = schedule.query_start_loc[r];
  const SequenceExtent extent{schedule.query_start_loc[r + 1] - first_token, schedule.seq_lens[r]};
  const std::int32_t* blocks = p.block_table.data + item.request * p.block_table.stride;

  const auto cached_row = [&](std::int64_t key) {
    return Row{cache.row(blocks[key / cache.block_size()], key % cache.block_size()),
               cache.format().dtype, 1, row_elements};
  };
  const auto load_key = [&](std::int64_t key, double* row) { load(cached_row(key), row); };
  const auto load_value = [&](std::int64_t key, double* row) {
    load(part_of(cached_row(key), 0, latent), row);
  };
  for (std::int64_t i = 0; i < extent.num_queries; ++i) {
    const std::int64_t token = first_token + i;
    const KeyInterval keys =
        intersect(visible_keys(p.variant, i, extent), {item.kv_begin, item.kv_end});
    const auto sees = [&](std::int64_t key) { return fovea::sees(p.variant, i, key, extent); };
    for (std::int64_t n = 0; n < p.q_latent.shape[1]; ++n) {
      load(row_of(p.q_latent, token, n), scratch.q);
      load(row_of(p.q_pe, token, n), scratch.q + latent);
      double* out = item.partial < 0 ? scratch.out : scratch.partials.out(item.partial, i, n);
      const double lse =
          attend({scratch.q, row_elements, latent, keys, static_cast<double>(p.sm_scale)}, sees,
                 load_key, load_value, scratch.attend, out);
      if (item.partial < 0) {
        write(p, token, n, out, lse);
      } else {
        scratch.partials.lse(item.partial, i, n) = lse;
      }
    }
  }
}

/// Merges partials [begin, end) of one query row and head.
void merge(const MlaDecodeParams& p, const Scratch& scratch, const IndexRange& partials,
           std::int64_t query, std::int64_t head, std::int64_t token) {
  const std::int64_t latent = p.q_latent.shape[2];
  double max = kEmptyLse;
  bool has_nan = false;
  for (std::int32_t s = partials.begin; s < partials.end; ++s) {
    const double lse = scratch.partials.lse(s, query, head);
    max = std::fmax(max, lse);
    has_nan = has_nan || std::isnan(lse);
  }
  std::fill_n(scratch.out, latent, 0.0);
  if (max == kEmptyLse && !has_nan) return write(p, token, head, scratch.out, kEmptyLse);

  double sum = 0;
  for (std::int32_t s = partials.begin; s < partials.end; ++s) {
    const double lse = scratch.partials.lse(s, query, head);
    if (lse == kEmptyLse) continue;
    const double weight = std::exp(lse - max);
    const double* out = scratch.partials.out(s, query, head);
    sum += weight;
    for (std::int64_t d = 0; d < latent; ++d) scratch.out[d] += weight * out[d];
  }
  for (std::int64_t d = 0; d < latent; ++d) scratch.out[d] /= sum;
  write(p, token, head, scratch.out, max + std::log(sum));
}

}  // namespace

std::int64_t mla_decode_scratch(const OpContext&, const MlaDecodeParams& p) {
  constexpr std::int64_t kElement = sizeof(double);
  const std::int64_t row_elements = p.cache->format().row_elements;
  return 2 * Workspace::rounded(row_elements * kElement) +
         Workspace::rounded(p.q_latent.shape[2] * kElement) +
         Workspace::rounded(longest_item(*p.schedule) * kElement) +
         Workspace::rounded(Partials::size(p) * kElement);
}

void mla_decode(const OpContext& ctx, const MlaDecodeParams& p) {
  const DecodeSchedule& schedule = *p.schedule;
  const std::int64_t heads = p.q_latent.shape[1];
  const std::int64_t latent = p.q_latent.shape[2];
  const std::int64_t row_elements = p.cache->format().row_elements;

  WorkspaceScope scope(*ctx.workspace);
  const Scratch scratch{
      .q = scope.take<double>(row_elements),
      .out = scope.take<double>(latent),
      .attend = {.scores = scope.take<double>(longest_item(schedule)),
                 .row = scope.take<double>(row_elements)},
      .partials = {scope.take<double>(Partials::size(p)), schedule.max_query_len, heads, latent}};

  for (const WorkItem& item : schedule.items) run_item(p, item, scratch);

  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    const IndexRange partials{schedule.partial_begin[r], schedule.partial_begin[r + 1]};
    if (partials.size() == 0) continue;
    const std::int64_t first_token = schedule.query_start_loc[r];
    for (std::int64_t token = first_token; token < schedule.query_start_loc[r + 1]; ++token) {
      for (std::int64_t n = 0; n < heads; ++n) {
        merge(p, scratch, partials, token - first_token, n, token);
      }
    }
  }
}

}  // namespace fovea::reference
