// Which keys a query sees, as Python says it.
#pragma once

#include <nanobind/nanobind.h>

#include "dlpack.h"
#include "fovea/error.h"
#include "fovea/plan.h"

namespace fovea::python {

inline AttentionVariant variant(bool causal, std::int64_t window_left,
                                std::int64_t attention_chunk, float soft_cap) {
  return {causal, window_left, attention_chunk, soft_cap};
}

/// None is no plan. Throws TypeError on anything else that is none.
inline const BatchPlan* plan_of(nanobind::handle object) {
  if (object.is_none()) return nullptr;
  if (nanobind::isinstance<BatchPlan>(object)) return &nanobind::cast<const BatchPlan&>(object);
  throw nanobind::type_error(
      ("plan is a " + name_of_type(object) + "; it must be a fovea.BatchPlan").c_str());
}

/// The variant of a call: the plan's where there is one. Throws when the call asks for another.
inline const AttentionVariant& variant_of(const BatchPlan* plan, const AttentionVariant& asked) {
  if (!plan) return asked;
  if (asked != AttentionVariant{} && asked != plan->variant) {
    throw Error(ErrorCode::invalid_argument,
                "causal, window_left, attention_chunk and soft_cap are the plan's: leave them out, "
                "or make a plan for these");
  }
  return plan->variant;
}

}  // namespace fovea::python
