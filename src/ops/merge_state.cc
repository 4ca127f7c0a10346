#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/overlap.h"

namespace fovea {
namespace {

const char* const kName = kMergeState.name;

/// Names of a state's two views.
struct StateNames {
  const char* out;
  const char* lse;
};
constexpr StateNames kPrefix{"prefix.out", "prefix.lse"};
constexpr StateNames kSuffix{"suffix.out", "suffix.lse"};
constexpr StateNames kResult{"result.out", "result.lse"};

void validate_state(const StateNames& names, const AttentionState& state, const TensorView& shape) {
  const std::int64_t tokens = shape.shape[0];
  const std::int64_t heads = shape.shape[1];
  check_view({kName, names.out}, state.out, {{"T", tokens}, {"N", heads}, {"D", shape.shape[2]}});
  check_compute_dtype({kName, names.out}, state.out);
  check_view({kName, names.lse}, state.lse, {{"N", heads}, {"T", tokens}});
  check_dtype({kName, names.lse}, state.lse, DType::f32);
  check_data({kName, names.out}, state.out);
  check_data({kName, names.lse}, state.lse);
}

/// The result may be `input` itself; anything in between would read what was already written.
void validate_alias(const AttentionState& result, const StateNames& names,
                    const AttentionState& input) {
  const Argument out{kName, kResult.out}, lse{kName, kResult.lse};
  if (!is_same_view(result.out, input.out)) check_disjoint(out, result.out, names.out, input.out);
  if (!is_same_view(result.lse, input.lse)) check_disjoint(lse, result.lse, names.lse, input.lse);
  check_disjoint(out, result.out, names.lse, input.lse);
  check_disjoint(lse, result.lse, names.out, input.out);
}

void validate(const MergeStateParams& p) {
  const Argument out{kName, kResult.out}, lse{kName, kResult.lse};
  check_view({kName, kPrefix.out}, p.prefix.out, {{"T"}, {"N"}, {"D"}});
  validate_state(kPrefix, p.prefix, p.prefix.out);
  validate_state(kSuffix, p.suffix, p.prefix.out);
  if (p.result.lse) {
    validate_state(kResult, p.result, p.prefix.out);
    check_output(lse, p.result.lse);
  } else {
    check_view(
        out, p.result.out,
        {{"T", p.prefix.out.shape[0]}, {"N", p.prefix.out.shape[1]}, {"D", p.prefix.out.shape[2]}});
    check_compute_dtype(out, p.result.out);
  }
  check_output(out, p.result.out);
  validate_alias(p.result, kPrefix, p.prefix);
  validate_alias(p.result, kSuffix, p.suffix);
  check_disjoint(lse, p.result.lse, kResult.out, p.result.out);
  if (!p.sinks) return;
  const Argument sinks{kName, "sinks"};
  check_sinks(sinks, p.sinks, p.prefix.out.shape[1]);
  check_data(sinks, p.sinks);
  check_disjoint(out, p.result.out, "sinks", p.sinks);
  check_disjoint(lse, p.result.lse, "sinks", p.sinks);
}

}  // namespace

void merge_state(const OpContext& ctx, const MergeStateParams& params) {
  check_devices(ctx, kName,
                {{"prefix.out", params.prefix.out}, {"prefix.lse", params.prefix.lse},
                 {"suffix.out", params.suffix.out}, {"suffix.lse", params.suffix.lse},
                 {"result.out", params.result.out}, {"result.lse", params.result.lse},
                 {"sinks", params.sinks}});
  validate(params);
  if (params.prefix.lse.numel() == 0) return;
  run(ctx, select(ctx, kMergeState, params), params);
}

}  // namespace fovea
