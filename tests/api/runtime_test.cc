// Choosing a backend, an instruction set and threads.
#include "fovea/runtime.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/ops.h"

namespace fovea {
namespace {

/// Sets an environment variable, or removes it, until the end of the scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, std::optional<std::string> value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ~ScopedVariable() { set(old_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void set(const std::optional<std::string>& value) {
    if (value) {
      setenv(name_, value->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

class RuntimeTest : public ::testing::Test {
 private:
  ScopedVariable backend_{"FOVEA_BACKEND", std::nullopt};
  ScopedVariable isa_{"FOVEA_ISA", std::nullopt};
};

RuntimeOptions with(const std::string& backend, const std::string& isa) {
  RuntimeOptions options;
  options.backend = backend;
  options.isa = isa;
  options.num_threads = 1;
  return options;
}

std::string error_of(const RuntimeOptions& options, ErrorCode code) {
  try {
    Runtime runtime(options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error for backend " << options.backend << ", isa " << options.isa;
  return "";
}

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" does not say " << part;
  }
}

TEST_F(RuntimeTest, TakesTheCpuByDefaultAndTheReferenceLast) {
  const Runtime runtime;
  EXPECT_EQ(runtime.backend(), "cpu");
  ASSERT_EQ(runtime.context().backends.size(), 2u);
  EXPECT_EQ(explain_implementations(runtime, DType::bf16).back().implementation, "reference/plain");
}

TEST_F(RuntimeTest, ReferenceIsAlone) {
  const Runtime runtime(with("reference", "auto"));
  EXPECT_EQ(runtime.backend(), "reference");
  EXPECT_EQ(runtime.isa(), "scalar");
  EXPECT_EQ(runtime.context().backends.size(), 1u);
}

TEST_F(RuntimeTest, AForcedInstructionSetIsTheOneThatRuns) {
  for (const char* isa : {"scalar", "avx2", "avx512", "avx512_bf16", "neon"}) {
    const ScopedVariable variable("FOVEA_ISA", isa);
    try {
      const Runtime runtime(with("auto", "auto"));
      EXPECT_EQ(runtime.isa(), isa);
      for (const ImplementationChoice& choice : explain_implementations(runtime, DType::bf16)) {
        if (!choice.reason.empty()) continue;
        // Additions wait for memory, whatever the instruction set: the reference's loops serve.
        const std::string wanted =
            choice.op == "add_residual" ? "reference/plain" : std::string("cpu/") + isa;
        EXPECT_EQ(choice.implementation, wanted);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      expect_says(error.what(), {"FOVEA_ISA is \"", isa, "scalar"});
    }
  }
}

TEST_F(RuntimeTest, CudaRunsItsOwnKernelsOrSaysWhyNot) {
  expect_says(error_of(with("cuda", "avx2"), ErrorCode::invalid_argument),
              {"isa is \"avx2\" with backend cuda", "auto", "plain"});
  const ScopedVariable variable("FOVEA_BACKEND", "cuda");
  for (const char* isa : {"auto", "plain"}) {
    try {
      const Runtime runtime(with("auto", isa));
      EXPECT_EQ(runtime.backend(), "cuda");
      EXPECT_FALSE(runtime.device_name().empty());
      for (const ImplementationChoice& choice : explain_implementations(runtime, DType::bf16)) {
        const bool fast = choice.op == "mla_decode" && runtime.isa() == "sm_90";
        const char* expected = fast ? "cuda/sm90" : "cuda/plain";
        if (choice.reason.empty()) {
          EXPECT_EQ(choice.implementation, expected);
        }
      }
      const Tensor x = Tensor::zeros(DType::f32, {1, 4});
      try {
        rms_norm(runtime, {x, x.view().select(0, 0), x});
      } catch (const Error& error) {  // Unless the GPU shares the host's page tables.
        expect_says(error.what(), {"x is in host memory", "pinned"});
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      expect_says(error.what(), {"cuda"});
    }
  }
}

TEST_F(RuntimeTest, OptionsWinOverTheEnvironment) {
  const ScopedVariable backend("FOVEA_BACKEND", "reference");
  const ScopedVariable isa("FOVEA_ISA", "no such thing");
  EXPECT_EQ(Runtime(with("auto", "auto")).backend(), "reference");
  const Runtime runtime(with("cpu", "scalar"));
  EXPECT_EQ(runtime.backend(), "cpu");
  EXPECT_EQ(runtime.isa(), "scalar");
}

TEST_F(RuntimeTest, AnEmptyVariableIsNone) {
  const ScopedVariable backend("FOVEA_BACKEND", "");
  const ScopedVariable isa("FOVEA_ISA", "");
  EXPECT_EQ(Runtime(with("auto", "auto")).backend(), "cpu");
}

TEST_F(RuntimeTest, UnknownNamesListTheKnownOnes) {
  expect_says(error_of(with("gpu", "auto"), ErrorCode::invalid_argument),
              {"backend is \"gpu\"", "cpu", "reference"});
  expect_says(error_of(with("cpu", "sse9"), ErrorCode::invalid_argument),
              {"isa is \"sse9\"", "scalar", "avx2", "avx512"});
  {
    const ScopedVariable variable("FOVEA_BACKEND", "tpu");
    expect_says(error_of(with("auto", "auto"), ErrorCode::invalid_argument),
                {"FOVEA_BACKEND is \"tpu\"", "cpu", "reference"});
  }
  const ScopedVariable variable("FOVEA_ISA", "mmx");
  expect_says(error_of(with("auto", "auto"), ErrorCode::invalid_argument),
              {"FOVEA_ISA is \"mmx\"", "scalar"});
}

TEST_F(RuntimeTest, ANegativeThreadCountIsRefused) {
  RuntimeOptions options;
  options.num_threads = -1;
  expect_says(error_of(options, ErrorCode::invalid_argument), {"num_threads is -1"});
}

TEST_F(RuntimeTest, OwnsAPoolOfTheAskedSizeOrBorrowsOne) {
  RuntimeOptions options;
  options.num_threads = 3;
  const Runtime owning(options);
  EXPECT_EQ(owning.num_threads(), 3);
  EXPECT_EQ(owning.context().plan_target.num_workers, 3);

  const std::unique_ptr<ThreadPool> pool = make_std_thread_pool(2);
  options.pool = pool.get();
  const Runtime borrowing(options);
  EXPECT_EQ(borrowing.context().pool, pool.get());
  EXPECT_EQ(borrowing.context().plan_target.num_workers, 2);
}

/// Someone else's threads: here none but the caller's, last task first.
class BackwardsPool : public ThreadPool {
 public:
  int num_threads() const override { return 4; }
  void run(std::int64_t num_tasks, TaskRef fn) override {
    for (std::int64_t task = num_tasks; task-- > 0;) fn(task);
  }
};

TEST_F(RuntimeTest, RunsOpsOnACallersOwnPool) {
  BackwardsPool pool;
  RuntimeOptions options;
  options.pool = &pool;
  const Runtime runtime(options);
  const std::vector<float> values(37 * 64, 2.f), ones(64, 1.f);
  const Tensor out = Tensor::zeros(DType::f32, {37, 64});
  rms_norm(runtime,
           {TensorView::of(values.data(), {37, 64}), TensorView::of(ones.data(), {64}), out, 0.f});
  for (std::int64_t i = 0; i < 37 * 64; ++i) EXPECT_FLOAT_EQ(out.ptr<float>()[i], 1.f);
}

TEST_F(RuntimeTest, CpuFeaturesAreNamed) { EXPECT_FALSE(cpu_features().empty()); }

}  // namespace
}  // namespace fovea
