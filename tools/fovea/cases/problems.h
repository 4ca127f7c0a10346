// One factory per op; make_problem chooses.
#pragma once

#include "cases/problem.h"

namespace fovea::cases {

using ProblemPtr = std::unique_ptr<Problem>;
ProblemPtr make_rms_norm(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_rope(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_merge_state(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_kv_append(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_kv_gather(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_mla_decode(const CaseLine& line, const OpContext& ctx);
/// attention_decode, and attention_prefill of a line with block_size.
ProblemPtr make_paged_attention(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_gqa_append(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_attention_prefill(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_mla_layer(const CaseLine& line, const OpContext& ctx);
ProblemPtr make_linear(const CaseLine& line, const OpContext& ctx);

}  // namespace fovea::cases
