// What problems of several requests share: runs over poisoned memory, and the float64 answer put
// together from each request's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "support/compare.h"

namespace fovea::test {

/// Runs `call` over poisoned outputs and workspace of exactly what `params` need.
template <class Params, class Call>
void run_poisoned(const OpContext& ctx, const Params& params, const PaddedTensor& out,
                  const PaddedTensor& lse, Call&& call) {
  ctx.workspace->reserve(workspace_bytes(ctx, params));
  poison(*ctx.workspace);
  poison(out);
  poison(lse);
  call();
  EXPECT_TRUE(out.padding_untouched());
  EXPECT_TRUE(lse.padding_untouched());
}

/// out [tokens, heads, width] and lse [heads, tokens]: expected_of(r) for each request with query
/// tokens, and 0 and -inf for rows of none.
template <class ExpectedOf>
oracle::AttentionResult put_together(const std::vector<std::int32_t>& query_start_loc,
                                     std::int64_t tokens, std::int64_t heads, std::int64_t width,
                                     ExpectedOf&& expected_of) {
  oracle::AttentionResult all;
  all.out.assign(static_cast<std::size_t>(tokens * heads * width), 0.0);
  all.lse.assign(static_cast<std::size_t>(heads * tokens),
                 -std::numeric_limits<double>::infinity());
  for (std::size_t r = 0; r + 1 < query_start_loc.size(); ++r) {
    const std::int64_t first = query_start_loc[r], queries = query_start_loc[r + 1] - first;
    if (queries == 0) continue;
    const oracle::AttentionResult one = expected_of(r);
    std::copy(one.out.begin(), one.out.end(), all.out.begin() + first * heads * width);
    for (std::int64_t n = 0; n < heads; ++n) {
      std::copy_n(one.lse.begin() + n * queries, queries, all.lse.begin() + n * tokens + first);
    }
  }
  return all;
}

}  // namespace fovea::test
