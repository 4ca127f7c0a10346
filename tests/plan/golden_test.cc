// Whole plans, compared as text with the files of golden/. After a wanted change of plans or of
// their printed form, FOVEA_UPDATE_GOLDENS=1 in the environment makes this test rewrite the files;
// read the difference before you commit it.
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "plan/plan_testing.h"

namespace fovea::testing {
namespace {

struct GoldenPlan {
  const char* file;
  Lens query_lens;
  Lens context_lens;
  std::int64_t workspace_rows = 256;
  ContextPlanKind context_plan = ContextPlanKind::packed;
  std::optional<ContextParallel> parallel = std::nullopt;
};

std::string list(const Lens& lens) {
  std::ostringstream out;
  for (std::size_t i = 0; i < lens.size(); ++i) out << (i > 0 ? " " : "") << lens[i];
  return out.str();
}

std::string print(const GoldenPlan& golden) {
  SequenceBatch batch;
  batch.query_start_loc = offsets_of(golden.query_lens);
  for (std::size_t i = 0; i < golden.query_lens.size(); ++i) {
    batch.seq_lens.push_back(golden.query_lens[i] + golden.context_lens[i]);
  }
  const PlanTarget target{.num_workers = 3, .decode_kv_tile = 64, .prefill_query_tile = 16};
  PlanOptions options;
  options.workspace_rows = golden.workspace_rows;
  options.context_plan = golden.context_plan;
  options.parallel = golden.parallel;
  const BatchPlan plan = make_plan(batch, target, options);
  if (std::string(golden.file).ends_with(".json")) return plan.to_json() + "\n";

  std::ostringstream out;
  out << "given: query tokens " << list(golden.query_lens) << "; context "
      << list(golden.context_lens) << "\n       "
      << (golden.context_plan == ContextPlanKind::packed ? "packed" : "equal")
      << " context plan, workspace of " << golden.workspace_rows
      << " rows, blocks of 16, 3 workers, tiles of 64 keys and 16 query rows";
  if (golden.parallel) {
    out << "\n       rank " << golden.parallel->rank << " of " << golden.parallel->ranks
        << ", turns of " << golden.parallel->interleave;
  }
  out << "\n\n" << plan.to_text();
  return out.str();
}

const GoldenPlan kGoldenPlans[] = {
    {"decode_only.txt", {1, 1, 1, 1}, {1500, 20, 699, 0}},
    {"mixed.txt", {1, 1, 40, 3, 17, 20}, {9, 600, 100, 0, 50, 300}},
    {"equal.txt", {5, 5, 5, 5}, {100, 0, 50, 300}, 256, ContextPlanKind::equal},
    {"continued_and_cut.txt", {8}, {600}},
    {"padded.txt", {1, 6, 0, 0}, {30, 10, 0, 0}},
    {"context_parallel.txt",
     {4, 4, 4},
     {37, 0, 300},
     256,
     ContextPlanKind::packed,
     ContextParallel{.ranks = 2, .rank = 0, .interleave = 4}},
    {"mixed.json", {1, 17, 3}, {150, 70, 0}, 64},
};

TEST(GoldenPlans, AreUnchanged) {
  const bool update = std::getenv("FOVEA_UPDATE_GOLDENS") != nullptr;
  for (const GoldenPlan& golden : kGoldenPlans) {
    const std::string path = std::string(FOVEA_TEST_DATA "/golden/") + golden.file;
    const std::string text = print(golden);
    if (update) std::ofstream(path) << text;
    std::ifstream file(path);
    ASSERT_TRUE(file) << path;
    const std::string expected{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(text, expected) << golden.file
                              << ": run with FOVEA_UPDATE_GOLDENS=1 if the change is wanted";
  }
}

}  // namespace
}  // namespace fovea::testing
