#include "fovea/engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "arguments.h"
#include "bindings.h"
#include "runtime.h"

namespace fovea::python {
namespace {

nb::dict percentiles_dict(const Percentiles& p) {
  nb::dict result;
  result["p50"] = p.p50;
  result["p90"] = p.p90;
  result["p99"] = p.p99;
  return result;
}

nb::dict report_dict(const ServeReport& r) {
  nb::dict result;
  nb::dict refused;
  for (const RefusedRequest& request : r.refused) {
    refused[nb::int_(request.request)] = nb::str(request.reason.c_str());
  }
  result["finished"] = r.finished;
  result["refused"] = refused;
  result["steps"] = r.steps;
  result["prompt_tokens"] = r.prompt_tokens;
  result["answer_tokens"] = r.answer_tokens;
  result["drafted_tokens"] = r.drafted_tokens;
  result["accepted_tokens"] = r.accepted_tokens;
  result["decode_step_ms"] = percentiles_dict(r.decode_step_ms);
  result["time_to_first_token_ms"] = percentiles_dict(r.time_to_first_token_ms);
  result["prefill_tokens_per_s"] = r.prefill_tokens_per_s;
  result["busy_ms"] = r.busy_ms;
  result["wall_ms"] = r.wall_ms;
  result["prefix_hit_tokens"] = r.prefix_hit_tokens;
  result["preemptions"] = r.preemptions;
  result["cache_bytes"] = r.cache_bytes;
  result["peak_workspace_bytes"] = r.peak_workspace_bytes;
  return result;
}

/// Stops serving when Python has a signal to deliver (Ctrl-C).
class Interruption {
 public:
  void poll() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() == 0) return;
    error_.emplace();
    stop_ = true;
  }
  const std::atomic<bool>* stop() const { return &stop_; }
  void raise() const {
    if (error_) throw *error_;
  }

 private:
  std::atomic<bool> stop_ = false;
  std::optional<nb::python_error> error_;
};

/// An engine with the runtime that it keeps while it serves.
class PyEngine {
 public:
  PyEngine(const Model& model, const SharedRuntime& runtime, const EngineOptions& options)
      : model_(model), runtime_(runtime), engine_(runtime.run([&](const OpContext& ctx) {
          return std::make_unique<Engine>(ctx, model, options);
        })) {}

  nb::dict serve(const Workload& workload, std::int64_t verify_rows) {
    Interruption interruption;
    std::optional<Verifier> verifier;
    ServeHooks hooks;
    if (verify_rows > 0) {
      verifier.emplace(model_, verify_rows, workload.seed);
      hooks.observers.push_back(&*verifier);
    }
    hooks.progress = [&](const ServeProgress&) { interruption.poll(); };
    hooks.stop = interruption.stop();
    const ServeReport report =
        runtime_.run([&](const OpContext&) { return engine_->serve(workload, hooks); });
    interruption.raise();
    nb::dict result = report_dict(report);
    if (verifier) {
      result["verified_rows"] = verifier->rows();
      result["worst_relative_error"] = verifier->worst_relative_error();
      result["worst_row"] = verifier->worst_row();
      result["error_limit"] = Verifier::limit(model_.dtype());
    }
    return result;
  }

 private:
  const Model& model_;
  const SharedRuntime& runtime_;
  std::unique_ptr<Engine> engine_;
};

void make_engine(PyEngine* self, const Model& model, nb::handle runtime, std::int64_t block_size,
                 std::int64_t num_blocks, std::int64_t max_num_seqs, std::int64_t token_budget,
                 const std::string& kv_format, bool prefix_reuse, std::int64_t draft_tokens,
                 double draft_acceptance) {
  EngineOptions options;
  options.block_size = block_size;
  options.num_blocks = num_blocks;
  options.max_num_seqs = max_num_seqs;
  options.token_budget = token_budget;
  options.kv_format = kv_format;
  options.prefix_reuse = prefix_reuse;
  options.draft_tokens = draft_tokens;
  options.draft_acceptance = draft_acceptance;
  new (self) PyEngine(model, runtime_of(runtime), options);
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Workload>(m, "Workload", "Requests to serve: lengths of prompts and answers.")
      .def_static("generate", &generate_workload, nb::arg("num_requests"), nb::arg("seed") = 0,
                  "Lengths like a chat service's; a third of the requests share prefixes.")
      .def_static("load", &load_workload, nb::arg("path"), nb::arg("limit") = -1,
                  nb::arg("seed") = 0,
                  "JSONL with prompt_tokens and answer_tokens, or CSV with "
                  "TIMESTAMP,ContextTokens,GeneratedTokens.")
      .def_static(
          "of_lengths",
          [](const std::vector<std::int32_t>& prompt_tokens,
             const std::vector<std::int32_t>& answer_tokens, std::uint64_t seed) {
            if (prompt_tokens.size() != answer_tokens.size()) {
              throw nb::value_error("prompt_tokens and answer_tokens must be equally many");
            }
            Workload workload{"of_lengths", seed, {}};
            for (std::size_t i = 0; i < prompt_tokens.size(); ++i) {
              RequestSpec request;
              request.prompt_tokens = prompt_tokens[i];
              request.answer_tokens = answer_tokens[i];
              workload.requests.push_back(request);
            }
            return workload;
          },
          nb::arg("prompt_tokens"), nb::arg("answer_tokens"), nb::arg("seed") = 0,
          "One request for each pair of lengths.")
      .def("__len__", [](const Workload& w) { return w.requests.size(); });

  nb::class_<PyEngine>(m, "Engine", R"(Serves workloads with a model's attention layers.

Continuous batching over paged caches: decodes first, then prompts in chunks; prefixes are reused;
when blocks run out the youngest request is put back. Attention without MLP.

Args:
    model: a Model.
    block_size: tokens of a block.
    num_blocks: 0: what the max_num_seqs longest requests need together.
    max_num_seqs: requests in a step.
    token_budget: rows in a step, decodes included.
    kv_format: a name of kv_format_names(); empty: the model's dtype.
    prefix_reuse: equal prefixes share blocks.
    draft_tokens, draft_acceptance: speculative steps, and how often a draft is right.
    runtime: a Runtime; None: the default one.

Raises:
    ValueError: names the option that is out of range or that this model cannot honour.)")
      .def("__init__", &make_engine, nb::arg("model"), nb::kw_only(),
           nb::arg("runtime") = nb::none(), nb::arg("block_size") = 16, nb::arg("num_blocks") = 0,
           nb::arg("max_num_seqs") = 32, nb::arg("token_budget") = 2048,
           nb::arg("kv_format") = "", nb::arg("prefix_reuse") = true,
           nb::arg("draft_tokens") = 0,
           nb::arg("draft_acceptance") = 0.7, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("serve", &PyEngine::serve, nb::arg("workload"), nb::kw_only(),
           nb::arg("verify_rows") = 0, R"(Answers every request once, or refuses it with the reason.

Args:
    workload: a Workload.
    verify_rows: about so many rows of each layer are checked against float64.

Returns:
    A dict: finished, refused, steps, times in milliseconds, tokens per second, bytes; with
    verify_rows also verified_rows, worst_relative_error, worst_row and error_limit.)");
}

}  // namespace fovea::python
