#include "cases/problem.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "cases/problems.h"
#include "fovea/error.h"

namespace fovea::cases {
namespace {

struct Entry {
  const char* op;
  ProblemPtr (*make)(const CaseLine&, const OpContext&);
};
constexpr std::array<Entry, 11> kEntries = {{{"rms_norm", make_rms_norm},
                                             {"rope", make_rope},
                                             {"kv_append", make_kv_append},
                                             {"kv_gather", make_kv_gather},
                                             {"gqa_append", make_gqa_append},
                                             {"attention_decode", make_paged_attention},
                                             {"attention_prefill", make_attention_prefill},
                                             {"mla_decode", make_mla_decode},
                                             {"merge_state", make_merge_state},
                                             {"mla_layer", make_mla_layer},
                                             {"linear", make_linear}}};

}  // namespace

const std::vector<std::string>& case_ops() {
  static const std::vector<std::string> ops = [] {
    std::vector<std::string> names;
    for (const Entry& entry : kEntries) names.emplace_back(entry.op);
    return names;
  }();
  return ops;
}

ProblemPtr make_problem(const CaseLine& line, const OpContext& ctx) {
  for (const Entry& entry : kEntries) {
    if (line.op() != entry.op) continue;
    ProblemPtr problem = entry.make(line, ctx);
    line.check_all_read();
    return problem;
  }
  throw Error(ErrorCode::invalid_argument, fmt::format("case: op was '{}', must be one of {}",
                                                       line.op(), fmt::join(case_ops(), ", ")));
}

}  // namespace fovea::cases
