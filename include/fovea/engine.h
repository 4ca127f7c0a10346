// Serves requests with a model's attention layers: continuous batching over paged caches. Attention
// without MLP: a layer is input_layernorm, attention, (post_attention_layernorm,) residual, and
// times are attention milliseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/model.h"

namespace fovea {

// ---------------------------------------------------------------- workloads

/// A request before it is served. Its tokens are functions of (seed, index, k), see token_id.
struct RequestSpec {
  double arrival_s = 0;  ///< Seconds from the first request.
  /// Real services log empty prompts and answers: files may hold 0, which the engine refuses.
  std::int32_t prompt_tokens = 0;
  std::int32_t answer_tokens = 0;
  /// Requests of one group have equal ids as far as both of their prefixes reach. -1: no group.
  std::int32_t prefix_group = -1;
  std::int32_t prefix_tokens = 0;  ///< At most prompt_tokens.

  /// Tokens that go through the layers: the last answer token is produced, never read.
  std::int64_t computed_tokens() const { return std::int64_t{prompt_tokens} + answer_tokens - 1; }
};

struct Workload {
  std::string name;
  std::uint64_t seed = 0;
  std::vector<RequestSpec> requests;

  /// Token ids in [0, vocab): the same in every run, never a function of outputs. k counts the
  /// prompt's tokens, then the answer's.
  std::int32_t token_id(std::int64_t request, std::int64_t k, std::int64_t vocab_size) const;
};

/// Lengths like a chat service's: log-normal, prompt median 1020 with 90 % below 2734, answer
/// median 129 with 90 % below 424; one request a second on average, Poisson; a third share
/// prefixes.
Workload generate_workload(std::int64_t num_requests, std::uint64_t seed);
/// JSONL with prompt_tokens, answer_tokens and optionally arrival_s, prefix_group, prefix_tokens;
/// or CSV with TIMESTAMP,ContextTokens,GeneratedTokens. The first `limit` requests; < 0: all.
/// Throws Error(corrupt_file) that names file, line and field.
Workload load_workload(const std::string& path, std::int64_t limit, std::uint64_t seed);

// ---------------------------------------------------------------- serving

enum class Arrivals : std::uint8_t {
  real,  ///< A request may start once its arrival time has passed.
  x10,   ///< The same, ten times as fast.
  none,  ///< All are there at the start.
};

struct EngineOptions {
  std::int64_t block_size = 16;
  /// Of a KV group whose layers see the whole sequence; 0: what the max_num_seqs longest requests
  /// need together. A group with a window or chunks has as many or, when that is less, what
  /// max_num_seqs windows and the rows of a step need.
  std::int64_t num_blocks = 0;
  std::int64_t max_num_seqs = 32;    ///< Requests in a step.
  std::int64_t token_budget = 2048;  ///< Rows in a step, decodes included.
  /// Context rows of a chunk, honoured exactly; 0: the formula. Latent attention only.
  std::int64_t workspace_rows = 0;
  /// By default packed with latent attention, whose prefills expand context chunk by chunk, and
  /// paged with grouped queries, whose prefills read it from the blocks: neither can do the other.
  std::optional<ContextPlanKind> context_plan;
  /// How rows are stored, see kv_format_names(); empty: in the model's dtype, as they are.
  std::string kv_format;
  bool prefix_reuse = true;
  Arrivals arrivals = Arrivals::none;
  /// Speculative decoding: a decode brings up to so many drafted tokens behind its known one, as
  /// far as budget and blocks go. What a draft model guessed is not modelled: each drafted token is
  /// the right one with probability draft_acceptance, by a hash of seed, request and position, and
  /// else another. Tokens behind the first wrong one are rolled back.
  std::int64_t draft_tokens = 0;
  double draft_acceptance = 0.7;
};

/// One layer of one step, while its operands are alive. For verification and dumps.
struct LayerTrace {
  std::int64_t step = 0;
  std::int64_t layer = 0;
  const BatchPlan* plan = nullptr;  ///< Of the layer's KV group, as is the block table.
  /// Host. Entries before what a window or chunk still shows are BlockTable::kNoBlock.
  BlockTableView block_table;
  /// After the step's rows were appended. Rows are latent, [kv_c | k_pe], or [K | V] of all heads.
  const PagedKvCache* cache = nullptr;
  /// In formats with scales V has a cache of its own beside K's, with the same blocks; else null.
  const PagedKvCache* v_cache = nullptr;
  TensorView input;                         ///< [T, H] the residual stream, before input_layernorm.
  TensorView output;                        ///< [T, H] after o_proj; no norm, no residual yet.
  std::span<const std::int64_t> positions;  ///< [T]
  std::span<const std::int32_t> query_start_loc;  ///< [requests of the batch + 1] into the rows.
  std::span<const std::int32_t> seq_lens;         ///< [requests of the batch]
  /// [requests of the batch] So many of a request's rows are its own tokens; the others are drafts
  /// that turn out wrong.
  std::span<const std::int32_t> num_true_rows;
  std::span<const std::int32_t> request_of;  ///< [requests of the batch] workload index.
  const Workload* workload = nullptr;
};

/// Called between ops by the serving thread; what it does is not counted in the times.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void on_layer(const LayerTrace& trace) = 0;
};

struct Percentiles {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
};
/// Nearest-rank percentiles; zeros for an empty sample.
Percentiles percentiles(std::vector<double> sample);

struct RefusedRequest {
  std::int64_t request = 0;
  std::string reason;
};

/// Blocks of the layers that share a plan and a block table.
struct KvGroupReport {
  std::int64_t num_layers = 0;
  AttentionVariant variant;
  std::int64_t num_blocks = 0;
  std::int64_t peak_blocks = 0;
  /// The same if no block were freed before its request ends: what a window saves.
  std::int64_t peak_blocks_unfreed = 0;
  std::int64_t freed_blocks = 0;  ///< Before their requests ended, all in all.
  std::int64_t block_bytes = 0;   ///< Of a block in all layers of the group.
};

/// What happened. Times are attention milliseconds.
struct ServeReport {
  std::int64_t finished = 0;
  std::vector<RefusedRequest> refused;
  std::int64_t unfinished = 0;  ///< Only after an interruption.
  std::int64_t steps = 0;
  std::int64_t decode_steps = 0;   ///< Steps of decodes only; step_ms and per_token_ms are theirs.
  std::int64_t prompt_tokens = 0;  ///< Computed, recomputation included, prefix hits not.
  std::int64_t answer_tokens = 0;
  std::int64_t drafted_tokens = 0;
  std::int64_t accepted_tokens = 0;  ///< Drafts that were the right token behind right ones.
  double tokens_per_decode = 0;      ///< Answer tokens of a request's decode step on average.
  Percentiles decode_step_ms;
  Percentiles decode_token_ms;  ///< Step time over its answer tokens.
  Percentiles time_to_first_token_ms;
  double prefill_tokens_per_s = 0;
  double gflops_per_s = 0;  ///< Visible attention work and projections over busy time.
  double busy_ms = 0;
  double step_ms = 0;    ///< Of all steps, their plans and tables included.
  double kernel_ms = 0;  ///< Of it, in ops and in products with weights; not measured on a GPU: 0.
  double wall_ms = 0;
  std::vector<KvGroupReport> kv_groups;  ///< Those with layers, in the order of the config.
  std::int64_t prefix_hit_tokens = 0;
  std::int64_t preemptions = 0;
  std::int64_t cache_bytes = 0;           ///< All layers.
  std::int64_t peak_context_rows = 0;     ///< The most that a plan asked of the workspace.
  std::int64_t workspace_bytes = 0;       ///< Reserved before the first step.
  std::int64_t peak_workspace_bytes = 0;  ///< Taken at most.
};

struct ServeProgress {
  std::int64_t requests_done = 0;
  std::int64_t requests = 0;
  std::int64_t tokens_done = 0;
  std::int64_t tokens = 0;
};

struct ServeHooks {
  std::vector<StepObserver*> observers;
  std::function<void(const ServeProgress&)> progress;  ///< After every step.
  const std::atomic<bool>* stop = nullptr;  ///< Serving ends after the step in which it turns true.
};

/// Serves workloads. First come first served; decodes first, then prompts in chunks; when blocks
/// run out the youngest request is put back and recomputed. At least a prompt's last token is
/// computed. Each KV group has its own blocks, one plan and one block table per step; what a window
/// or chunk hides from all later tokens is freed, and stays findable for equal prefixes until the
/// block is needed.
class Engine {
 public:
  /// Throws Error(invalid_argument) that names the option: out of range, or nothing that the
  /// model's kind of attention can honour.
  Engine(const OpContext& ctx, const Model& model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Every request is answered once or refused with the reason.
  ServeReport serve(const Workload& workload, const ServeHooks& hooks = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ---------------------------------------------------------------- proof

/// Checks sampled rows of every layer against float64: the stored row from the layer's input, and
/// the attention output over the rows that are stored, with the window, chunk, cap and sinks that
/// the config says. Drafts that turn out wrong are not sampled.
/// In a format that loses something, prompts are checked against what they see: their chunk's rows
/// as they are. Then only the first 128 rows of a chunk are sampled.
class Verifier : public StepObserver {
 public:
  /// About `rows` sampled per layer over the whole run.
  Verifier(const Model& model, std::int64_t rows, std::uint64_t seed);
  ~Verifier() override;
  void on_layer(const LayerTrace& trace) override;

  std::int64_t rows() const;
  /// Of an output row's norm. Stored rows are compared element by element, as far as half a step of
  /// their format does not explain the distance.
  double worst_relative_error() const;
  std::string worst_row() const;  ///< "layer 3, request 17, position 1203: output ...".
  /// 1e-4 (f32), 2e-3 (f16), 1.2e-2 (bf16).
  static double limit(DType dtype);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Writes DIR/request-NNNNNN.safetensors with `output` [answer tokens, hidden] F32: last layer,
/// after o_proj, before the residual, of the token that yields each answer token.
class Dumper : public StepObserver {
 public:
  Dumper(const Model& model, const Workload& workload, std::string directory);
  ~Dumper() override;
  void on_layer(const LayerTrace& trace) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// One layer step, norms and projections included, of one request with one new token that attends
/// to `context` keys, its own among them.
struct CompareResult {
  /// "expanded_cache", "expand_every_step", "fovea", or "fovea, int8_per_token" and so on.
  std::string method;
  std::int64_t context = 0;
  std::int64_t cache_bytes = 0;
  double step_ms = 0;      ///< Median.
  double worst_error = 0;  ///< Of the output row's norm, against float64.
};
/// Of the model's first layer: (a) contiguous expanded K and V with attention split over heads and
/// keys, (b) the latent cache expanded by kv_b_proj every step, then as (a), (c) fovea; in one run,
/// taking turns. Throws Error(invalid_argument) on a context beyond the model's positions,
/// Error(unsupported) on a model without latent attention.
std::vector<CompareResult> compare_methods(const OpContext& ctx, const Model& model,
                                           std::span<const std::int64_t> contexts);

}  // namespace fovea
