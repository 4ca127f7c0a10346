// Every test of an op runs on every backend that this machine has, in every compute dtype.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "fovea/error.h"
#include "fovea/runtime.h"
#include "ops/dispatch.h"
#include "support/compare.h"
#include "support/poison.h"

namespace fovea::test {

/// Of "reference", "cuda", "cuda_plain", or the instruction set that the cpu backend is forced to.
inline RuntimeOptions options_of(const std::string& backend, int num_threads) {
  RuntimeOptions options;
  if (backend == "reference" || backend == "cuda") {
    options.backend = backend;
  } else {
    options.backend = backend == "cuda_plain" ? "cuda" : "cpu";
    options.isa = backend == "cuda_plain" ? "plain" : backend;
  }
  options.num_threads = num_threads;
  return options;
}

inline constexpr const char* kBackends[] = {"reference",   "scalar", "avx2", "avx512",
                                            "avx512_bf16", "neon",   "cuda", "cuda_plain"};

/// Why this machine cannot run a backend; empty when it can.
inline std::string why_unavailable(const std::string& backend) {
  try {
    Runtime(options_of(backend, 1));
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    return error.what();
  }
}

inline std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const char* name : kBackends) {
    if (why_unavailable(name).empty()) names.emplace_back(name);
  }
  return names;
}

using BackendAndDType = std::tuple<std::string, DType>;

class BackendTest : public ::testing::TestWithParam<BackendAndDType> {
 protected:
  Runtime& runtime() { return runtime_; }
  const OpContext& ctx() const { return runtime_; }
  DType dtype() const { return std::get<1>(GetParam()); }
  const std::string& backend() const { return std::get<0>(GetParam()); }
  /// What a weight may be off by, relative to itself, before it multiplies values,
  /// for queries of bf16: docs/semantics.md, Rounding.
  double weight_rounding() const {
    const bool rounds = backend() == "scalar" || backend() == "avx512_bf16" || backend() == "cuda";
    return rounds ? 0x1p-8 : 0;
  }
  /// Fails where a GPU with kernels of its own would leave these operands to `plain`.
  template <class Params>
  void expect_fast(const Op<Params>& op, const Params& params) {
    if (runtime_.isa() != "sm_90" || dtype() == DType::f32) return;
    EXPECT_STREQ(select(ctx(), op, params).name, "sm90");
  }

 private:
  Runtime runtime_{options_of(std::get<0>(GetParam()), 2)};
};

inline std::string backend_case_name(const ::testing::TestParamInfo<BackendAndDType>& info) {
  return std::get<0>(info.param) + "_" + std::string(name_of(std::get<1>(info.param)));
}

#define FOVEA_FOR_EACH_BACKEND(Suite)                                             \
  INSTANTIATE_TEST_SUITE_P(                                                       \
      , Suite,                                                                    \
      ::testing::Combine(::testing::ValuesIn(available_backends()),               \
                         ::testing::Values(DType::f32, DType::f16, DType::bf16)), \
      backend_case_name)

/// What attention may lose, relative to a row's norm: several roundings of its operands' dtype, and
/// in f32 the rounding of scores, which the softmax turns into relative error.
inline RowTolerance attention_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {2e-5, 2e-6};
    case DType::f16:
      return {2e-3, 1e-5};
    default:
      return {1.2e-2, 1e-4};
  }
}

/// The log-sum-exp has no rounding to a small dtype anywhere: scores are f32 or wider.
inline constexpr double kLseAbsolute = 2e-4;
inline constexpr double kLseRelative = 2e-6;

inline ::testing::AssertionResult all_nan(const TensorView& view) {
  for (double x : to_doubles(view)) {
    if (!std::isnan(x)) return ::testing::AssertionFailure() << x << " in " << to_string(view);
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult all_zero(const TensorView& view) {
  return values_close(std::vector<double>(static_cast<std::size_t>(view.numel()), 0.0), view, 0);
}

/// Fails unless `call` throws Error(code) whose text has every one of `parts`.
template <class Call>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error; one was expected that says " << parts.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "\"" << error.what() << "\" does not say \"" << part << "\"";
    }
  }
}

}  // namespace fovea::test
