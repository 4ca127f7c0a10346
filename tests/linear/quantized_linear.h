// Products with quantised weights in exactly the workspace that they ask for, all NaN.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "linear/places.h"
#include "support/poison.h"

namespace fovea::test {

class QuantizedLinear : public testing::TestWithParam<PlaceAndDType> {
 protected:
  DType dtype() const { return std::get<1>(GetParam()); }
  MemorySource memory() const { return place_.memory(); }
  /// Of a product with `codes`.
  std::string name(const char* codes) const {
    return std::string(place_.is_gpu() ? "cublaslt/" : "plain/") + codes;
  }
  ExecutionContext ctx() { return place_.context(*pool_, workspace_); }

  void run(const Linear& linear, const PaddedTensor& x, const PaddedTensor& out) {
    workspace_.reserve(linear.workspace_bytes(x.view().shape[0]));
    test::poison(workspace_);
    test::poison(out);
    linear(ctx(), x, out);
    EXPECT_EQ(workspace_.peak(), linear.workspace_bytes(x.view().shape[0]));
    EXPECT_TRUE(out.padding_untouched());
    workspace_.reset_peak();
  }

  Place place_{std::get<0>(GetParam())};
  std::unique_ptr<ThreadPool> pool_ = make_std_thread_pool(2);
  Workspace workspace_{place_.memory()};
};

}  // namespace fovea::test
