#include "ops/checks.h"
#include "ops/dispatch.h"

namespace fovea {
namespace {

const char* const kName = kMlaDecode.name;

/// Each item is a range of its request's keys, with a partial of that request where there are
/// several; together they have every key of the requests that have query tokens.
void validate_items(const DecodeSchedule& schedule) {
  const auto requests = static_cast<std::int64_t>(schedule.seq_lens.size());
  std::int64_t keys = 0;
  for (const WorkItem& item : schedule.items) {
    const bool in_range = item.request >= 0 && item.request < requests;
    const auto r = static_cast<std::size_t>(in_range ? item.request : 0);
    FOVEA_CHECK(in_range && item.kv_begin >= 0 && item.kv_begin <= item.kv_end &&
                    item.kv_end <= schedule.seq_lens[r],
                invalid_argument,
                "{}: schedule item has keys [{}, {}) of request {}; they must be keys of one of {} "
                "requests",
                kName, item.kv_begin, item.kv_end, item.request, requests);
    const std::int32_t begin = schedule.partial_begin[r];
    const std::int32_t end = schedule.partial_begin[r + 1];
    FOVEA_CHECK(begin == end ? item.partial == -1 : item.partial >= begin && item.partial < end,
                invalid_argument,
                "{}: schedule item of request {} has partial {}; it must be -1 or in [{}, {})",
                kName, item.request, item.partial, begin, end);
    keys += item.kv_end - item.kv_begin;
  }
  std::int64_t expected_keys = 0;
  std::int64_t expected_items = schedule.num_partials();
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    if (schedule.query_start_loc[r] == schedule.query_start_loc[r + 1]) continue;
    expected_keys += schedule.seq_lens[r];
    expected_items += schedule.partial_begin[r] == schedule.partial_begin[r + 1] ? 1 : 0;
  }
  FOVEA_CHECK(
      keys == expected_keys && static_cast<std::int64_t>(schedule.items.size()) == expected_items,
      invalid_argument,
      "{}: schedule has {} items with {} keys; it must have {} items with {} keys", kName,
      schedule.items.size(), keys, expected_items, expected_keys);
}

void validate_schedule(const MlaDecodeParams& p) {
  FOVEA_CHECK(p.schedule != nullptr, invalid_argument,
              "{}: schedule is null; it must come from schedule_decode (mla_decode_once plans for "
              "you)",
              kName);
  const DecodeSchedule& schedule = *p.schedule;
  check_offsets({kName, "schedule->query_start_loc"}, schedule.query_start_loc, p.q_latent.shape[0],
                "the rows of q_latent");
  FOVEA_CHECK(
      schedule.query_start_loc.size() == schedule.seq_lens.size() + 1, invalid_argument,
      "{}: schedule->query_start_loc has {} entries; it must have one more than seq_lens, {}",
      kName, schedule.query_start_loc.size(), schedule.seq_lens.size());
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    FOVEA_CHECK(schedule.seq_lens[r] >= 0, invalid_argument,
                "{}: schedule->seq_lens[{}] is {}; it must not be negative", kName, r,
                schedule.seq_lens[r]);
    const std::int32_t query_len = schedule.query_start_loc[r + 1] - schedule.query_start_loc[r];
    FOVEA_CHECK(query_len <= schedule.max_query_len, invalid_argument,
                "{}: schedule request {} has {} query tokens; max_query_len = {} must cover them",
                kName, r, query_len, schedule.max_query_len);
  }
  check_offsets({kName, "schedule->partial_begin"}, schedule.partial_begin,
                static_cast<std::int64_t>(schedule.items.size()), "the number of items");
  FOVEA_CHECK(schedule.partial_begin.size() == schedule.seq_lens.size() + 1, invalid_argument,
              "{}: schedule->partial_begin has {} entries; it must have one more than seq_lens, {}",
              kName, schedule.partial_begin.size(), schedule.seq_lens.size());
  check_offsets({kName, "schedule->worker_begin"}, schedule.worker_begin,
                static_cast<std::int64_t>(schedule.items.size()), "the number of items");
  FOVEA_CHECK(schedule.worker_begin.back() == static_cast<std::int64_t>(schedule.items.size()),
              invalid_argument,
              "{}: schedule->worker_begin ends at {}; it must end at the number of items, {}",
              kName, schedule.worker_begin.back(), schedule.items.size());
  validate_items(schedule);
}

/// What workspace_bytes needs: everything but the data.
void validate_shapes(const MlaDecodeParams& p) {
  const Argument q_latent{kName, "q_latent"}, q_pe{kName, "q_pe"};
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_view(q_latent, p.q_latent, {{"T"}, {"N"}, {"L"}});
  check_compute_dtype(q_latent, p.q_latent);
  const std::int64_t tokens = p.q_latent.shape[0];
  const std::int64_t heads = p.q_latent.shape[1];
  const std::int64_t latent = p.q_latent.shape[2];
  FOVEA_CHECK(heads > 0 && latent > 0, invalid_argument,
              "{}: q_latent is {}; N and L must be positive", kName, to_string(p.q_latent));
  check_view(q_pe, p.q_pe, {{"T", tokens}, {"N", heads}, {"R"}});
  check_dtype(q_pe, p.q_pe, p.q_latent.dtype);
  check_cache(kName, p.cache, latent + p.q_pe.shape[2], "L + R");
  check_view(out, p.out, {{"T", tokens}, {"N", heads}, {"L", latent}});
  check_dtype_or_f32(out, p.out, p.q_latent.dtype);
  if (p.lse) {
    check_view(lse, p.lse, {{"N", heads}, {"T", tokens}});
    check_dtype(lse, p.lse, DType::f32);
  }
  check_sm_scale(kName, p.sm_scale);
  validate_schedule(p);
}

void validate_data(const MlaDecodeParams& p) {
  const Argument out{kName, "out"}, lse{kName, "lse"};
  check_data({kName, "q_latent"}, p.q_latent);
  check_data({kName, "q_pe"}, p.q_pe);
  check_output(out, p.out);
  if (p.lse) check_output(lse, p.lse);
  const TensorView rows = bytes_of_rows(*p.cache);
  check_disjoint(out, p.out, "q_latent", p.q_latent);
  check_disjoint(out, p.out, "q_pe", p.q_pe);
  check_disjoint(out, p.out, "cache", rows);
  check_disjoint(lse, p.lse, "q_latent", p.q_latent);
  check_disjoint(lse, p.lse, "q_pe", p.q_pe);
  check_disjoint(lse, p.lse, "cache", rows);
  check_disjoint(lse, p.lse, "out", p.out);

  const DecodeSchedule& schedule = *p.schedule;
  check_block_table(kName, p.block_table, static_cast<std::int64_t>(schedule.seq_lens.size()));
  for (std::size_t r = 0; r < schedule.seq_lens.size(); ++r) {
    if (schedule.query_start_loc[r] == schedule.query_start_loc[r + 1]) continue;
    check_block_row(kName, p.block_table, *p.cache, static_cast<std::int64_t>(r), 0,
                    schedule.seq_lens[r]);
  }
}

}  // namespace

std::int64_t workspace_bytes(const OpContext& ctx, const MlaDecodeParams& params) {
  validate_shapes(params);
  return scratch_bytes(ctx, select(ctx, kMlaDecode, params), params);
}

void mla_decode(const OpContext& ctx, const MlaDecodeParams& params) {
  validate_shapes(params);
  validate_data(params);
  const auto& implementation = select_with_scratch(ctx, kMlaDecode, params);
  if (params.schedule->query_start_loc.back() > 0) implementation.run(ctx, params);
  write_padding_rows(params.schedule->query_start_loc.back(), params.out, params.lse);
}

void mla_decode_once(const OpContext& ctx, const MlaDecodeParams& params,
                     std::span<const std::int32_t> query_start_loc,
                     std::span<const std::int32_t> seq_lens) {
  const DecodeSchedule schedule = schedule_decode(query_start_loc, seq_lens, ctx.plan_target);
  MlaDecodeParams planned = params;
  planned.schedule = &schedule;
  Workspace workspace;
  workspace.reserve(workspace_bytes(ctx, planned));
  OpContext once = ctx;
  once.workspace = &workspace;
  mla_decode(once, planned);
}

}  // namespace fovea
