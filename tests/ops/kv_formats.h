// Ragged requests over a cache of any format, in blocks of any size.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/ops.h"
#include "ops/backend_test.h"
#include "ops/stored_rows.h"

namespace fovea::test {

/// Two requests of ragged lengths.
inline constexpr std::int32_t kQueryLens[] = {3, 1};
inline constexpr std::int32_t kSeqLens[] = {131, 40};
inline constexpr std::int64_t kTokens = 4;
inline const std::vector<std::int32_t> kQueryStart{0, 3, 4};
inline const std::vector<std::int32_t> kKeyStart{0, 131, 171};
inline const std::vector<OwnedKeys> kAllKeys{{0, 131}, {0, 40}};
inline constexpr std::int64_t kBlockSizes[] = {1, 16, 48, 64, 100};

class KvFormats : public BackendTest {
 protected:
  template <class Params, class Call>
  void run_poisoned(const Params& params, const PaddedTensor& out, Call&& call) {
    ctx().workspace->reserve(workspace_bytes(ctx(), params));
    poison(*ctx().workspace);
    poison(out);
    call();
    EXPECT_TRUE(out.padding_untouched());
  }
};

}  // namespace fovea::test
