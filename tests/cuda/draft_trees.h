// Draft trees for checks.
#pragma once

#include <cstdint>
#include <vector>

namespace fovea::cuda::test {

/// Binary trees of so many drafts, one behind the other: the parent of i is (i - 1) / 2.
inline std::vector<std::uint64_t> binary_trees(const std::vector<std::int32_t>& query_lens) {
  std::vector<std::uint64_t> all;
  for (const std::int32_t query_len : query_lens) {
    std::vector<std::uint64_t> tree;
    for (std::int32_t i = 0; i < query_len; ++i) {
      tree.push_back(std::uint64_t{1} << i | (i == 0 ? 0 : tree[(i - 1) / 2]));
    }
    all.insert(all.end(), tree.begin(), tree.end());
  }
  return all;
}

}  // namespace fovea::cuda::test
