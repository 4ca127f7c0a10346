// Which requests of a batch are decodes.
#include <string>

#include "core/check.h"
#include "fovea/plan.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

void check_policy(const SplitPolicy& policy, std::size_t num_reqs,
                  std::span<const std::uint8_t> is_prefilling) {
  FOVEA_CHECK(policy.reorder_batch_threshold >= 1, invalid_argument,
              "reorder_batch_threshold is {}, must be at least 1", policy.reorder_batch_threshold);
  FOVEA_CHECK(
      policy.support != QueryLenSupport::single_only || policy.reorder_batch_threshold == 1,
      invalid_argument,
      "reorder_batch_threshold is {}, must be 1 with QueryLenSupport::single_only, whose decode "
      "kernel takes one query token",
      policy.reorder_batch_threshold);
  FOVEA_CHECK(policy.treat_short_extends_as_decodes || is_prefilling.size() == num_reqs,
              invalid_argument,
              "is_prefilling has {} entries, must have {}, one per request, without "
              "treat_short_extends_as_decodes",
              is_prefilling.size(), num_reqs);
}

bool is_decode(std::int32_t query_len, const SplitPolicy& policy,
               std::span<const std::uint8_t> is_prefilling, std::size_t request) {
  if (query_len > policy.reorder_batch_threshold) return false;
  return policy.treat_short_extends_as_decodes || is_prefilling[request] == 0;
}

BatchSplit split_at(std::span<const std::int32_t> query_start_loc, std::size_t num_decodes) {
  const auto num_reqs = static_cast<std::int32_t>(query_start_loc.size() - 1);
  BatchSplit split;
  split.num_decodes = static_cast<std::int32_t>(num_decodes);
  split.num_prefills = num_reqs - split.num_decodes;
  split.num_decode_tokens = query_start_loc[num_decodes];
  split.num_prefill_tokens = query_start_loc.back() - split.num_decode_tokens;
  return split;
}

std::string list_lengths(std::span<const std::int32_t> query_start_loc) {
  std::string list;
  for (std::size_t i = 1; i < query_start_loc.size(); ++i) {
    if (i > 1) list += ", ";
    list += std::to_string(query_start_loc[i] - query_start_loc[i - 1]);
  }
  return list;
}

}  // namespace

std::vector<std::pair<std::int32_t, std::int32_t>> reorder_swaps(
    std::span<const std::int32_t> query_lens, const SplitPolicy& policy,
    std::span<const std::uint8_t> is_prefilling) {
  check_policy(policy, query_lens.size(), is_prefilling);
  check_lengths("query_lens", query_lens);
  std::size_t num_decodes = 0;
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    num_decodes += is_decode(query_lens[i], policy, is_prefilling, i) ? 1 : 0;
  }
  // As many prefills stand in the decodes' part as decodes stand behind it: the first of the former
  // changes places with the last of the latter, and so on inwards.
  std::vector<std::pair<std::int32_t, std::int32_t>> swaps;
  std::size_t back = query_lens.size();
  for (std::size_t front = 0; front < num_decodes; ++front) {
    if (is_decode(query_lens[front], policy, is_prefilling, front)) continue;
    do {
      --back;
    } while (!is_decode(query_lens[back], policy, is_prefilling, back));
    swaps.emplace_back(static_cast<std::int32_t>(front), static_cast<std::int32_t>(back));
  }
  return swaps;
}

BatchSplit split_decodes_and_prefills(std::span<const std::int32_t> query_start_loc,
                                      const SplitPolicy& policy,
                                      std::span<const std::uint8_t> is_prefilling) {
  check_offsets("query_start_loc", query_start_loc);
  const std::size_t num_reqs = query_start_loc.size() - 1;
  check_policy(policy, num_reqs, is_prefilling);
  const auto query_len = [&](std::size_t i) { return query_start_loc[i + 1] - query_start_loc[i]; };

  std::size_t num_active = num_reqs;
  while (num_active > 0 && query_len(num_active - 1) == 0) --num_active;

  const bool uniform = policy.support != QueryLenSupport::varlen;
  std::size_t num_decodes = 0;
  while (num_decodes < num_active &&
         is_decode(query_len(num_decodes), policy, is_prefilling, num_decodes)) {
    if (uniform && query_len(num_decodes) != query_len(0)) break;
    ++num_decodes;
  }

  std::size_t first_prefill = num_decodes;
  while (first_prefill < num_active &&
         is_decode(query_len(first_prefill), policy, is_prefilling, first_prefill)) {
    ++first_prefill;
  }
  for (std::size_t i = first_prefill; i < num_active; ++i) {
    FOVEA_CHECK(query_len(i) == 0 || !is_decode(query_len(i), policy, is_prefilling, i),
                invalid_argument,
                "query_start_loc: request {} with {} query tokens is a decode but stands behind "
                "request {} with {}, a prefill; decodes must come first (see reorder_swaps)",
                i, query_len(i), first_prefill, query_len(first_prefill));
  }
  return split_at(query_start_loc, num_decodes == num_active ? num_reqs : num_decodes);
}

BatchSplit split_uniform_blocks(std::span<const std::int32_t> query_start_loc) {
  check_offsets("query_start_loc", query_start_loc);
  const std::size_t num_reqs = query_start_loc.size() - 1;
  const auto query_len = [&](std::size_t i) { return query_start_loc[i + 1] - query_start_loc[i]; };
  std::size_t num_active = 0;
  while (num_active < num_reqs && query_len(num_active) > 0 &&
         query_len(num_active) == query_len(0)) {
    ++num_active;
  }
  FOVEA_CHECK(
      num_active > 0 && query_start_loc[num_active] == query_start_loc.back(), invalid_argument,
      "query_start_loc: query lengths are [{}], must be one length for all active requests, "
      "then zeros, for non-causal decode",
      list_lengths(query_start_loc));
  return split_at(query_start_loc, num_reqs);
}

void check_decode_capture(std::span<const std::int32_t> query_start_loc,
                          const SplitPolicy& policy) {
  check_offsets("query_start_loc", query_start_loc);
  for (std::size_t i = 1; i < query_start_loc.size(); ++i) {
    const std::int32_t query_len = query_start_loc[i] - query_start_loc[i - 1];
    FOVEA_CHECK(
        query_len >= 1 && query_len <= policy.reorder_batch_threshold, invalid_argument,
        "query_start_loc: request {} has {} query tokens, must have 1 to {} (the threshold) "
        "in a captured decode step",
        i - 1, query_len, policy.reorder_batch_threshold);
  }
}

}  // namespace fovea
