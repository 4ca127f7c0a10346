#include "cases/rules.h"

#include <algorithm>
#include <bit>

namespace fovea::cases {
namespace {

std::int64_t first_seen(const AttentionVariant& variant, std::int64_t position) {
  std::int64_t first = 0;
  if (variant.window_left >= 0) first = position - variant.window_left;
  if (variant.attention_chunk > 0 && position >= 0) {
    first = std::max(first, position - position % variant.attention_chunk);
  }
  return std::max<std::int64_t>(0, first);
}

std::vector<std::uint64_t> make_tree(const std::vector<std::int32_t>& query_start_loc,
                                     bool is_fork) {
  std::vector<std::uint64_t> tree;
  for (std::size_t r = 0; r + 1 < query_start_loc.size(); ++r) {
    const auto first = static_cast<std::ptrdiff_t>(tree.size());
    for (std::int32_t i = 0; i < query_start_loc[r + 1] - query_start_loc[r]; ++i) {
      const std::int32_t parent = is_fork ? (i - 1) / 2 : i - 1;
      const std::uint64_t seen = i == 0 ? 0 : tree[static_cast<std::size_t>(first + parent)];
      tree.push_back(seen | std::uint64_t{1} << (i & 63));
    }
  }
  return tree;
}

}  // namespace

oracle::Attention Rules::problem(std::int64_t num_queries, std::int64_t num_keys) const {
  oracle::Attention problem;
  problem.num_queries = num_queries;
  problem.num_keys = num_keys;
  problem.causal = variant.causal;
  problem.window_left = variant.window_left;
  problem.attention_chunk = variant.attention_chunk;
  problem.soft_cap = variant.soft_cap;
  return problem;
}

std::span<const std::uint64_t> Rules::tree_of(std::int64_t begin, std::int64_t end) const {
  if (draft_tree.empty()) return {};
  return std::span(draft_tree)
      .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

std::int64_t Rules::first_key(std::int64_t num_queries, std::int64_t num_keys) const {
  return std::min(first_seen(variant, num_keys - num_queries), num_keys);
}

double Rules::visible_pairs(std::int64_t begin, std::int64_t num_queries,
                            std::int64_t num_keys) const {
  const std::int64_t context = num_keys - num_queries;
  std::int64_t pairs = 0;
  for (std::int64_t i = 0; i < num_queries; ++i) {
    if (draft_tree.empty()) {
      const std::int64_t end = variant.causal ? context + i + 1 : num_keys;
      pairs += std::max<std::int64_t>(0, end - first_seen(variant, context + i));
      continue;
    }
    const std::uint64_t* tree = draft_tree.data() + begin;
    const auto position_of = [&](std::int64_t j) { return context + std::popcount(tree[j]) - 1; };
    const std::int64_t first = first_seen(variant, position_of(i));
    pairs += std::max<std::int64_t>(0, context - first);
    for (std::int64_t j = 0; j <= i; ++j) {
      pairs += (tree[i] >> j & 1) != 0 && position_of(j) >= first ? 1 : 0;
    }
  }
  return static_cast<double>(pairs);
}

Rules read_rules(const OpContext& ctx, const CaseLine& line, std::int64_t heads,
                 Random& random) {
  Rules rules;
  rules.variant.causal = line.integer("causal", 1, {0, 1}) == 1;
  rules.variant.window_left = line.integer("window", -1, {-1});
  rules.variant.attention_chunk = line.integer("attention_chunk", 0, {0});
  rules.variant.soft_cap = static_cast<float>(line.integer("soft_cap", 0, {0}));
  if (line.integer("sinks", 0, {0, 1}) == 1) {
    rules.sinks = normal_array(ctx, {DType::f32, {heads}}, random, 2.0);
  }
  return rules;
}

Rules read_decode_rules(const OpContext& ctx, const CaseLine& line, std::int64_t heads,
                        const std::vector<std::int32_t>& query_start_loc, Random& random) {
  Rules rules = read_rules(ctx, line, heads, random);
  const std::string tree = line.word("tree", "none", {"none", "chain", "fork"});
  if (tree != "none") rules.draft_tree = make_tree(query_start_loc, tree == "fork");
  return rules;
}

}  // namespace fovea::cases
