// What a case says about who sees whom: window, attention chunk, soft cap, sinks, drafts.
#pragma once

#include <cstdint>
#include <vector>

#include "cases/operands.h"
#include "fovea/attention_variant.h"
#include "fovea/oracle.h"

namespace fovea::cases {

struct Rules {
  AttentionVariant variant;
  Array sinks;                            ///< [heads] f32, or absent.
  std::vector<std::uint64_t> draft_tree;  ///< Of all query tokens, or empty.

  /// What the oracle needs to know, but for the operands.
  oracle::Attention problem(std::int64_t num_queries, std::int64_t num_keys) const;
  /// The drafts of query tokens [begin, end).
  std::span<const std::uint64_t> tree_of(std::int64_t begin, std::int64_t end) const;
  std::vector<double> sink_values() const {
    return sinks.view ? sinks.values() : std::vector<double>{};
  }
  /// The first of a sequence's keys that any of its queries sees; keys before may be missing.
  std::int64_t first_key(std::int64_t num_queries, std::int64_t num_keys) const;
  /// (query, key) pairs that attention sees, of query tokens from `begin` on.
  double visible_pairs(std::int64_t begin, std::int64_t num_queries, std::int64_t num_keys) const;
};

/// `lse`: 0 leaves it out.
inline bool has_lse(const CaseLine& line) { return line.integer("lse", 1, {0, 1}) == 1; }

/// `causal`, `window`, `attention_chunk`, `soft_cap` and `sinks` of a line.
Rules read_rules(const OpContext& ctx, const CaseLine& line, std::int64_t heads,
                 Random& random);
/// The same and `tree`: none, chain, or fork, where token i is drafted behind token (i - 1) / 2.
Rules read_decode_rules(const OpContext& ctx, const CaseLine& line, std::int64_t heads,
                        const std::vector<std::int32_t>& query_start_loc, Random& random);

}  // namespace fovea::cases
