// Where products run: on the host, and on a GPU where this machine has one that they can use.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fovea/error.h"
#include "fovea/linear.h"
#include "fovea/runtime.h"
#include "fovea/thread_pool.h"

namespace fovea::test {

class Place {
 public:
  /// "host" or "gpu".
  explicit Place(const std::string& name) {
    if (name == "gpu") gpu_ = std::make_unique<Runtime>(RuntimeOptions{.backend = "cuda"});
  }
  bool is_gpu() const { return gpu_ != nullptr; }
  MemorySource memory() const { return gpu_ ? gpu_->context().memory : MemorySource{}; }
  ExecutionContext context(ThreadPool& pool, Workspace& workspace) const {
    return {.pool = &pool, .workspace = &workspace, .memory = memory()};
  }

 private:
  std::unique_ptr<Runtime> gpu_;
};

inline std::vector<std::string> available_places() {
  std::vector<std::string> names = {"host"};
  try {
    const Place gpu("gpu");
    const float weight = 1;
    const Linear product(TensorView::of(&weight, {1, 1}), {}, LinearBackend::automatic,
                         gpu.memory());
    names.emplace_back("gpu");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
  }
  return names;
}

using PlaceAndDType = std::tuple<std::string, DType>;

inline std::string place_case_name(const ::testing::TestParamInfo<PlaceAndDType>& info) {
  return std::get<0>(info.param) + "_" + std::string(name_of(std::get<1>(info.param)));
}

}  // namespace fovea::test
