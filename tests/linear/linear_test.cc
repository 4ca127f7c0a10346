#include "fovea/linear.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/thread_pool.h"
#include "support/compare.h"

namespace fovea {
namespace {

class LinearTest : public testing::Test {
 protected:
  LinearTest() { workspace_.reserve(1 << 16); }
  std::string error_of(const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "nothing was thrown";
  }
  std::unique_ptr<ThreadPool> pool_ = make_openmp_thread_pool(2);
  Workspace workspace_;
  ExecutionContext ctx_{pool_.get(), &workspace_};
};

TEST_F(LinearTest, ProductByHand) {
  const Tensor weight =
      test::tensor_from(DType::f32, {3, 2}, std::vector<double>{1, 10, 2, 20, 3, 30});
  const Tensor bias = test::tensor_from(DType::f32, {3}, std::vector<double>{0.5, 0, -1});
  const Tensor x = test::tensor_from(DType::f32, {2, 2}, std::vector<double>{1, 2, -1, 0});
  Tensor out = Tensor::empty(DType::f32, {2, 3});
  const Linear linear(weight, bias);
  EXPECT_EQ(linear.in_features(), 2);
  EXPECT_EQ(linear.out_features(), 3);
  linear(ctx_, x, out);
  EXPECT_EQ(test::to_doubles(out), (std::vector<double>{21.5, 42, 62, -0.5, -2, -4}));
}

TEST_F(LinearTest, HeadsByHand) {
  const Tensor weight = test::tensor_from(
      DType::f32, {2, 2, 3}, std::vector<double>{1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6});
  const Tensor x = test::tensor_from(DType::f32, {1, 2, 2}, std::vector<double>{1, 10, 2, 20});
  Tensor out = Tensor::empty(DType::f32, {1, 2, 3});
  const BatchedLinear linear(weight);
  linear(ctx_, x, out);
  EXPECT_EQ(test::to_doubles(out), (std::vector<double>{41, 52, 63, -82, -104, -126}));
}

TEST_F(LinearTest, NoRowsIsNoWork) {
  const Linear linear(Tensor::zeros(DType::bf16, {3, 2}), {});
  EXPECT_EQ(linear.workspace_bytes(0), 0);
  linear(ctx_, Tensor::empty(DType::bf16, {0, 2}), Tensor::empty(DType::bf16, {0, 3}));
}

TEST_F(LinearTest, ErrorsNameTheOperand) {
  const auto expect_error = [&](const auto& call, std::vector<std::string> parts) {
    const std::string text = error_of(call);
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
    }
  };
  const Tensor weight = Tensor::zeros(DType::f32, {3, 2});
  expect_error([&] { Linear(weight, Tensor::zeros(DType::f32, {2})); },
               {"bias is f32[2]", "must be f32[3], like weight f32[3, 2]"});
  expect_error(
      [&] {
        Linear(Tensor::zeros(DType::i32, {3, 2}), {});
      },
      {"weight is i32[3, 2]", "must be f32, f16 or bf16"});
  expect_error([&] { BatchedLinear{weight}; }, {"weight is f32[3, 2]", "[heads, in, out]"});
  const Linear linear(weight, {});
  Tensor x = Tensor::zeros(DType::f32, {4, 2}), out = Tensor::zeros(DType::f32, {4, 3});
  test::poison(out);
  expect_error(
      [&] {
        linear(ctx_, Tensor::zeros(DType::f32, {4, 5}), out);
      },
      {"x is f32[4, 5]", "must be f32[T, 2] with unit innermost stride"});
  expect_error(
      [&] {
        linear(ctx_, x, Tensor::zeros(DType::bf16, {4, 3}));
      },
      {"out is bf16[4, 3]", "must be f32[T, 3] with unit innermost stride"});
  expect_error(
      [&] {
        linear(ctx_, Tensor::zeros(DType::f32, {2, 4}).view().transpose(0, 1), out);
      },
      {"x is f32[4, 2] strides [1, 4]", "unit innermost stride"});
  expect_error([&] { linear(ctx_, x.view().slice(0, 0, 3), out); },
               {"out is f32[4, 3]", "must have as many rows as x, f32[3, 2]"});
  EXPECT_TRUE(test::still_poisoned(out.view().data, out.nbytes()));
}

TEST_F(LinearTest, WeightsAreWhereTheContextComputes) {
  const Tensor x = Tensor::zeros(DType::f32, {2, 2}), out = Tensor::zeros(DType::f32, {2, 2});
  const Linear linear(Tensor::zeros(DType::f32, {2, 2}), {});
  ExecutionContext elsewhere = ctx_;
  elsewhere.memory.device = {Device::Type::cuda, 1};
  EXPECT_EQ(error_of([&] { linear(elsewhere, x, out); }),
            "weights are on the CPU, but ctx computes on CUDA device 1: make them with its memory");
  TensorView moved = x;
  moved.device = {Device::Type::cuda, 1};
  EXPECT_EQ(error_of([&] { linear(ctx_, moved, out); }),
            "x is on CUDA device 1, but must be on the CPU, as weights are");
  EXPECT_EQ(error_of([&] {
              Linear(Tensor::zeros(DType::f32, {2, 2}), {}, LinearBackend::plain,
                     elsewhere.memory);
            }),
            "linear backend is plain, but must be automatic for weights on CUDA device 1");
}

TEST_F(LinearTest, ReloadKeepsTheShape) {
  Linear linear(Tensor::zeros(DType::f32, {3, 2}), {});
  linear.reload(test::tensor_from(DType::f32, {3, 2}, std::vector<double>{1, 0, 2, 0, 3, 0}), {});
  Tensor out = Tensor::empty(DType::f32, {1, 3});
  linear(ctx_, test::tensor_from(DType::f32, {1, 2}, std::vector<double>{2, 0}), out);
  EXPECT_EQ(test::to_doubles(out), (std::vector<double>{2, 4, 6}));
  EXPECT_NE(error_of([&] {
              linear.reload(Tensor::zeros(DType::f32, {2, 3}), {});
            }).find("reload with weight f32[2, 3]"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              linear.reload(Tensor::zeros(DType::f32, {3, 2}), Tensor::zeros(DType::f32, {3}));
            }).find("and a bias"),
            std::string::npos);
}

class LinearEnvironment : public LinearTest {
 protected:
  LinearEnvironment() {
    if (const char* value = std::getenv("FOVEA_LINEAR")) before_ = value;
  }
  ~LinearEnvironment() override {
    if (before_.empty()) {
      unsetenv("FOVEA_LINEAR");
    } else {
      setenv("FOVEA_LINEAR", before_.c_str(), 1);
    }
  }
  std::string before_;
};

TEST_F(LinearEnvironment, ForcesABackendOnlyWhereNoneWasAskedFor) {
  const Tensor weight = Tensor::zeros(DType::f32, {3, 2});
  setenv("FOVEA_LINEAR", "plain", 1);
  EXPECT_EQ(Linear(weight, {}).backend_name(), "plain");
  std::string onednn = "onednn/f32";
  try {
    onednn = Linear(weight, {}, LinearBackend::onednn).backend_name();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(onednn, "onednn/f32");
  setenv("FOVEA_LINEAR", "onednn", 1);
  EXPECT_EQ(Linear(weight, {}).backend_name(), "onednn/f32");
  EXPECT_EQ(Linear(weight, {}, LinearBackend::plain).backend_name(), "plain");
}

TEST_F(LinearEnvironment, UnknownNameIsAnError) {
  setenv("FOVEA_LINEAR", "mkl", 1);
  EXPECT_EQ(error_of([] {
              Linear(Tensor::zeros(DType::f32, {3, 2}), {});
            }),
            "FOVEA_LINEAR is 'mkl', but must be onednn, plain or auto");
}

TEST(OpenMpThreadPool, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 3}) {
    const auto pool = make_openmp_thread_pool(threads);
    EXPECT_EQ(pool->num_threads(), threads);
    for (std::int64_t tasks : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      pool->run(tasks, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
      for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
    }
  }
  EXPECT_GE(make_openmp_thread_pool()->num_threads(), 1);
}

}  // namespace
}  // namespace fovea
