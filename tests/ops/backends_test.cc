// Which backends the other tests of this program cover here.
#include "fovea/ops.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

class Availability : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, Availability, ::testing::ValuesIn(kBackends),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Availability, EveryOpHasOneImplementationThatRuns) {
  const std::string reason = why_unavailable(GetParam());
  if (!reason.empty()) GTEST_SKIP() << reason;
  const Runtime runtime(options_of(GetParam(), 1));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::string> ops, running;
    for (const ImplementationChoice& choice : explain_implementations(runtime, dtype)) {
      if (ops.empty() || ops.back() != choice.op) ops.push_back(choice.op);
      if (choice.reason.empty()) running.push_back(choice.op);
    }
    EXPECT_EQ(ops, running);
    const std::vector<std::string> all = {
        "rms_norm",  "add_residual",      "rope",             "kv_append",      "gqa_append",
        "kv_gather", "attention_prefill", "attention_decode", "quantize_query", "mla_decode",
        "merge_state", "quantize_output"};
    EXPECT_EQ(ops, all);
  }
}

}  // namespace
}  // namespace fovea::test
