// Products with quantised weights in exactly the workspace that they ask for, all NaN.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "fovea/linear.h"
#include "fovea/thread_pool.h"
#include "support/poison.h"

namespace fovea::test {

class QuantizedLinear : public testing::TestWithParam<DType> {
 protected:
  void run(const Linear& linear, const PaddedTensor& x, const PaddedTensor& out) {
    workspace_.reserve(linear.workspace_bytes(x.view().shape[0]));
    test::poison(workspace_);
    test::poison(out);
    linear({pool_.get(), &workspace_}, x, out);
    EXPECT_EQ(workspace_.peak(), linear.workspace_bytes(x.view().shape[0]));
    EXPECT_TRUE(out.padding_untouched());
    workspace_.reset_peak();
  }

  std::unique_ptr<ThreadPool> pool_ = make_std_thread_pool(2);
  Workspace workspace_;
};

}  // namespace fovea::test
