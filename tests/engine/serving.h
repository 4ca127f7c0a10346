// Serving a tiny model in tests: runs, outputs and poison.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "fovea/runtime.h"
#include "model/checkpoint_files.h"
#include "support/tiny_model.h"

namespace fovea::test {

/// Fills what the cache did not get from the first step with NaN, and the workspace with it.
class Poisoner : public StepObserver {
 public:
  explicit Poisoner(const OpContext& ctx) : ctx_(ctx) {}
  void on_layer(const LayerTrace& trace) override {
    constexpr std::int64_t kEvery = 16;  // Steps: a workspace of 65536 rows takes its time.
    if (trace.step % kEvery != 0) return;
    WorkspaceScope scope(*ctx_.workspace);
    const std::int64_t free_bytes = ctx_.workspace->capacity() - ctx_.workspace->used();
    std::memset(scope.take_bytes(free_bytes), 0xff, static_cast<std::size_t>(free_bytes));
    if (trace.step > 0) return;
    std::set<std::int64_t> written;
    for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
      for (std::int64_t p = 0; p < trace.seq_lens[i]; ++p) {
        const std::int32_t* blocks =
            trace.block_table.data + static_cast<std::int64_t>(i) * trace.block_table.stride;
        written.insert(blocks[p / trace.cache->block_size()] * trace.cache->block_size() +
                       p % trace.cache->block_size());
      }
    }
    for (std::int64_t slot = 0; slot < trace.cache->num_slots(); ++slot) {
      if (written.contains(slot)) continue;
      std::memset(trace.cache->slot(slot), 0xff,
                  static_cast<std::size_t>(trace.cache->format().row_bytes()));
    }
  }

 private:
  const OpContext& ctx_;
};

/// What a dump file holds, checked against the format's rules.
inline std::vector<float> read_dump(const std::string& path, std::int64_t rows,
                                    std::int64_t columns) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::uint64_t header_size = 0;
  if (bytes.size() < sizeof header_size) {
    ADD_FAILURE() << path << " holds " << bytes.size() << " bytes";
    return {};
  }
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  const json header = json::parse(bytes.substr(8, header_size)).at("output");
  EXPECT_EQ(header.at("dtype"), "F32");
  EXPECT_EQ(header.at("shape"), (std::vector<std::int64_t>{rows, columns}));
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  EXPECT_EQ(header.at("data_offsets"), (std::vector<std::size_t>{0, values.size() * 4}));
  EXPECT_EQ(bytes.size(), 8 + header_size + values.size() * 4);
  EXPECT_EQ((8 + header_size) % 8, 0u);
  std::memcpy(values.data(), bytes.data() + 8 + header_size, values.size() * 4);
  return values;
}

struct Outcome {
  ServeReport report;
  std::vector<std::vector<float>> outputs;  ///< [requests] of [answer tokens, H]; refused: empty.
  std::int64_t verified_rows = 0;
  double worst_error = 0;
  std::string worst_row;
};

/// Serves with every output dumped, rows verified and everything foreign poisoned.
inline Outcome serve(const OpContext& ctx, const Model& model, const Workload& workload,
                     const EngineOptions& options, std::vector<StepObserver*> more_observers = {}) {
  const TempDir directory;
  Poisoner poisoner(ctx);
  Verifier verifier(model, 60, 1);
  Dumper dumper(model, workload, directory.path() + "/dump");
  ServeHooks hooks;
  hooks.observers = std::move(more_observers);
  hooks.observers.insert(hooks.observers.end(), {&verifier, &dumper, &poisoner});
  Engine engine(ctx, model, options);
  Outcome outcome;
  outcome.report = engine.serve(workload, hooks);
  outcome.verified_rows = verifier.rows();
  outcome.worst_error = verifier.worst_relative_error();
  outcome.worst_row = verifier.worst_row();
  std::set<std::int64_t> refused;
  for (const RefusedRequest& request : outcome.report.refused) refused.insert(request.request);
  for (std::int64_t i = 0; i < std::ssize(workload.requests); ++i) {
    char name[40];
    std::snprintf(name, sizeof name, "/dump/request-%06d.safetensors", static_cast<int>(i));
    std::vector<float>& output = outcome.outputs.emplace_back();
    if (refused.contains(i)) continue;
    output = read_dump(directory.path() + name,
                       workload.requests[static_cast<std::size_t>(i)].answer_tokens,
                       model.config().hidden_size);
  }
  return outcome;
}

/// Rows of the same requests differ by at most `tolerance` of their norm.
inline ::testing::AssertionResult same_outputs(const Outcome& expected, const Outcome& got,
                                               std::int64_t width, double tolerance) {
  for (std::size_t i = 0; i < expected.outputs.size(); ++i) {
    const std::vector<float>&a = expected.outputs[i], &b = got.outputs[i];
    if (a.size() != b.size()) {
      return ::testing::AssertionFailure()
             << "request " << i << " has " << b.size() << " values, expected " << a.size();
    }
    for (std::size_t begin = 0; begin < a.size(); begin += static_cast<std::size_t>(width)) {
      double norm = 0, error = 0;
      for (std::size_t k = begin; k < begin + static_cast<std::size_t>(width); ++k) {
        norm += double{a[k]} * a[k];
        error += (double{a[k]} - b[k]) * (double{a[k]} - b[k]);
      }
      if (!(std::sqrt(error) <= tolerance * std::sqrt(norm))) {
        return ::testing::AssertionFailure()
               << "request " << i << ", answer token " << begin / static_cast<std::size_t>(width)
               << ": off by " << std::sqrt(error / norm) << " of the row norm";
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace fovea::test
