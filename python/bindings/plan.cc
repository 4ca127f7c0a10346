#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "runtime.h"
#include "variant.h"

namespace fovea::python {
namespace {

template <class T>
std::vector<T> copy_of(std::span<const std::int32_t> values) {
  return std::vector<T>(values.begin(), values.end());
}

void make(BatchPlan* self, nb::object query_start_loc, nb::object seq_lens,
          nb::handle runtime, std::optional<std::vector<bool>> is_prefilling,
          std::vector<std::uint64_t> draft_tree, bool causal, std::int64_t window_left,
          std::int64_t attention_chunk, float soft_cap, std::int32_t decode_threshold,
          const std::string& query_lens, const std::string& context_plan,
          std::int64_t workspace_rows, std::int64_t block_size) {
  Arguments arguments;
  SequenceBatch batch;
  batch.query_start_loc =
      copy_of<std::int32_t>(arguments.integers(query_start_loc, "query_start_loc"));
  batch.seq_lens = copy_of<std::int32_t>(arguments.integers(seq_lens, "seq_lens"));
  if (is_prefilling) batch.is_prefilling.assign(is_prefilling->begin(), is_prefilling->end());
  batch.draft_tree = std::move(draft_tree);
  PlanOptions options;
  options.split.reorder_batch_threshold = decode_threshold;
  options.split.support = choice<QueryLenSupport>(query_lens, "query_lens",
                                                  {{"single_only", QueryLenSupport::single_only},
                                                   {"uniform", QueryLenSupport::uniform},
                                                   {"varlen", QueryLenSupport::varlen}});
  options.variant = variant(causal, window_left, attention_chunk, soft_cap);
  options.context_plan = choice<ContextPlanKind>(context_plan, "context_plan",
                                                 {{"packed", ContextPlanKind::packed},
                                                  {"equal", ContextPlanKind::equal},
                                                  {"paged", ContextPlanKind::paged}});
  options.workspace_rows = workspace_rows;
  options.block_size = block_size;
  new (self) BatchPlan(make_plan(batch, runtime_of(runtime).plan_target(), options));
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<BatchPlan>(m, "BatchPlan",
                        R"(What is decided about a step of layers that see the same keys.

Made once, shared by all of them; immutable. Requests with at most `decode_threshold` query tokens
come first and are decodes.

Args:
    query_start_loc: [requests + 1] int32, from 0: the query tokens of each request.
    seq_lens: [requests] int32, context and query tokens.
    runtime: whose capacities the plan is for; None: the default one.
    is_prefilling: [requests], the request still reads its prompt.
    draft_tree: [query tokens] bit masks: bit j says that a token sees its request's query token j.
    causal, window_left, attention_chunk, soft_cap: which keys a query sees, as in fovea's
        attention functions; they hold for every op that runs with the plan.
    query_lens: of decodes: "single_only", "uniform" or "varlen".
    context_plan: "packed" or "equal" for MlaLayer, "paged" for AttentionLayer.
    workspace_rows: context rows that a chunk gathers at most.
    block_size: tokens of a block.

Raises:
    ValueError: lengths that contradict each other, a batch that is not ordered, options that do
        not fit; the field is named.)")
      .def("__init__", &make, nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::kw_only(),
           nb::arg("runtime") = nb::none(), nb::arg("is_prefilling") = nb::none(),
           nb::arg("draft_tree") = std::vector<std::uint64_t>{}, nb::arg("causal") = true,
           nb::arg("window_left") = -1, nb::arg("attention_chunk") = 0, nb::arg("soft_cap") = 0.f,
           nb::arg("decode_threshold") = 1, nb::arg("query_lens") = "single_only",
           nb::arg("context_plan") = "packed", nb::arg("workspace_rows") = 64 * 1024,
           nb::arg("block_size") = 16)
      .def_prop_ro("num_decodes", [](const BatchPlan& p) { return p.split.num_decodes; })
      .def_prop_ro("num_prefills", [](const BatchPlan& p) { return p.split.num_prefills; })
      .def_prop_ro("num_decode_tokens",
                   [](const BatchPlan& p) { return p.split.num_decode_tokens; })
      .def_prop_ro("num_prefill_tokens",
                   [](const BatchPlan& p) { return p.split.num_prefill_tokens; })
      .def_ro("num_actual_tokens", &BatchPlan::num_actual_tokens)
      .def_ro("max_query_len", &BatchPlan::max_query_len)
      .def_ro("max_seq_len", &BatchPlan::max_seq_len)
      .def_ro("peak_context_rows", &BatchPlan::peak_context_rows,
              "The most context rows that one chunk gathers.")
      .def_prop_ro("num_chunks", [](const BatchPlan& p) { return p.chunks.size(); })
      .def("to_json", &BatchPlan::to_json)
      .def("__str__", &BatchPlan::to_text);
}

}  // namespace fovea::python
