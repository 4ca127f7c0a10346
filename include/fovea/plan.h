// Everything that is decided about a step before any kernel runs. Pure host logic.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention_variant.h"

namespace fovea {

// ---------------------------------------------------------------- decode or prefill

/// Which query lengths a backend's decode kernel takes.
enum class QueryLenSupport {
  single_only,  ///< One query token.
  uniform,      ///< The same number of query tokens in every row.
  varlen,       ///< Any mix of query lengths.
};

struct SplitPolicy {
  /// A request with at most this many query tokens is a decode. single_only requires 1.
  std::int32_t reorder_batch_threshold = 1;
  QueryLenSupport support = QueryLenSupport::single_only;
  /// A prompt's short part (query_len <= threshold) counts as a decode. Off under prefill context
  /// parallelism: there only requests that already answer do, so `is_prefilling` must be given.
  bool treat_short_extends_as_decodes = true;
};

/// Row swaps that put the decodes (query_len <= threshold) before the prefills: as few as possible,
/// disjoint, not stable.
/// `is_prefilling` (per request) matters only without treat_short_extends_as_decodes.
std::vector<std::pair<std::int32_t, std::int32_t>> reorder_swaps(
    std::span<const std::int32_t> query_lens, const SplitPolicy& policy,
    std::span<const std::uint8_t> is_prefilling = {});

struct BatchSplit {
  std::int32_t num_decodes = 0;
  std::int32_t num_prefills = 0;
  std::int32_t num_decode_tokens = 0;
  std::int32_t num_prefill_tokens = 0;
  bool operator==(const BatchSplit&) const = default;
};

/// The decodes at the front of an already ordered batch; the first request that is none, or that
/// differs from the first request's length where the policy needs uniformity, starts the prefills.
/// Trailing zero-length rows are padding: decodes in a batch without prefills, prefills after one.
/// Throws Error(invalid_argument) on a decode behind a request that can only be a prefill.
BatchSplit split_decodes_and_prefills(std::span<const std::int32_t> query_start_loc,
                                      const SplitPolicy& policy,
                                      std::span<const std::uint8_t> is_prefilling = {});

/// For non-causal decode of several tokens: all active rows first and of one length, zero rows
/// after. Throws Error(invalid_argument) that lists the lengths.
BatchSplit split_uniform_blocks(std::span<const std::int32_t> query_start_loc);

/// A decode-only step that is captured once and replayed needs 1 to threshold query tokens in every
/// request. Throws Error(invalid_argument) that names the first request outside.
void check_decode_capture(std::span<const std::int32_t> query_start_loc, const SplitPolicy& policy);

// ---------------------------------------------------------------- workspace rows

struct WorkspaceRowsInput {
  std::int64_t max_model_len = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t block_size = 0;
  std::int64_t cap = 64 * 1024;    ///< Rows; 128 * 1024 is the other choice in use.
  std::int64_t context_ranks = 1;  ///< Ranks of decode context parallelism.
  std::int64_t interleave = 1;     ///< Tokens per rank and turn.
  /// Round up to a multiple of the alignment: block_size, with several ranks
  /// lcm(block_size, context_ranks * interleave).
  bool align = true;
  /// At least one alignment per sequence, which the equal context plan needs; the packed one does
  /// with a single alignment. Without `align` nothing is raised: too few rows are an error.
  bool one_alignment_per_sequence = true;
};

/// Rows of the context workspace: min(max(8 * max_model_len, 4 * max_num_seqs * block_size), cap),
/// then aligned. Throws Error(invalid_argument) that names the field when a capacity is out of
/// range or the rows are too few for the context plan.
std::int64_t workspace_rows(const WorkspaceRowsInput& input);

/// Rows to allocate for a workspace of `workspace_rows`: with several ranks, the gathered rows of
/// one rank lie behind those of all. Throws Error(invalid_argument) unless ranks divides the rows.
std::int64_t allocated_workspace_rows(std::int64_t workspace_rows, std::int64_t context_ranks);

// ---------------------------------------------------------------- context chunks

struct IndexRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t size() const { return end - begin; }
  bool operator==(const IndexRange&) const = default;
};

/// Tokens are dealt to ranks `interleave` at a time: token t lies on rank (t / interleave) % ranks.
struct ContextParallel {
  std::int32_t ranks = 1;
  std::int32_t rank = 0;
  std::int32_t interleave = 1;
  bool operator==(const ContextParallel&) const = default;
};

/// Tokens of the first `length` that lie on `rank`.
std::int64_t local_length(std::int64_t length, const ContextParallel& parallel, std::int32_t rank);

/// Rows that each rank keeps for the first `length` tokens when all keep the same number: whole
/// turns.
std::int64_t padded_local_length(std::int64_t length, const ContextParallel& parallel);

/// Query rows [query_begin, query_end) of one request, of one head at a time: a prefill kernel's
/// task. Rows are local to the request.
struct PrefillTile {
  std::int32_t request = 0;
  std::int32_t query_begin = 0;
  std::int32_t query_end = 0;
  bool operator==(const PrefillTile&) const = default;
};

/// One ragged attention call: request i owns query rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]) and
/// key rows [cu_seqlens_k[i], cu_seqlens_k[i + 1]); with paged keys the first so many of its rows.
struct PrefillSchedule {
  std::vector<std::int32_t> cu_seqlens_q;
  std::vector<std::int32_t> cu_seqlens_k;
  /// [requests] Position in the sequence of each request's first query and first key. Both empty:
  /// keys start at 0, and the last query stands at the last key.
  std::vector<std::int32_t> first_query;
  std::vector<std::int32_t> first_key;
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;
  std::vector<PrefillTile> tiles;  ///< Longest first, so that dynamic scheduling ends even.
};

/// Rank-local view of a chunk under decode context parallelism. Rows are padded so that every rank
/// gathers the same number.
struct ContextParallelChunk {
  std::vector<std::int32_t> local_starts;              ///< [requests] rank-local rows.
  std::vector<std::int32_t> padded_local_seq_lens;     ///< [requests]
  std::vector<std::int32_t> padded_local_cu_seq_lens;  ///< [requests + 1]
  /// [num_local_context_tokens] request, local to the chunk; only with token_to_seq.
  std::vector<std::int32_t> padded_local_token_to_seq;
  /// [requests][ranks] share of each rank in the request's whole context, not padded.
  std::vector<std::vector<std::int32_t>> local_context_lens_all_ranks;
  std::int32_t num_local_context_tokens = 0;  ///< Padded; at most workspace_rows / ranks.
};

/// A slice of context that prefills gather, expand and attend to in one go. Requests and tokens
/// count from the first prefill of the batch.
struct ContextChunk {
  std::int32_t index = 0;
  IndexRange requests;
  IndexRange tokens;  ///< All query tokens of `requests`.
  /// Query tokens [tokens.begin, merge_end) already have a partial from an earlier chunk and are
  /// merged with it; [merge_end, tokens.end) get their first one and are written.
  std::int32_t merge_end = 0;
  /// End of the first request's query tokens, whether or not it is a continuation.
  std::int32_t continuation_token_end = 0;
  bool is_continuation = false;        ///< The first request's rows were in an earlier chunk too.
  std::vector<std::int32_t> starts;    ///< [requests] first context position gathered.
  std::vector<std::int32_t> seq_lens;  ///< [requests] context rows gathered.
  /// [num_context_tokens] request, local to the chunk; only with token_to_seq.
  std::vector<std::int32_t> token_to_seq;
  std::int32_t num_context_tokens = 0;  ///< Rows of the workspace that the chunk fills.
  /// The attention call: query rows count from tokens.begin, key rows from the workspace's first.
  PrefillSchedule schedule;
  std::optional<ContextParallelChunk> parallel;
};

/// One request's context rows [start, start + seq_len) in a chunk.
struct ContextSpan {
  std::int32_t request = 0;
  std::int32_t start = 0;
  std::int32_t seq_len = 0;
  bool operator==(const ContextSpan&) const = default;
};

enum class ContextPlanKind {
  packed,  ///< Fills each chunk with whole contexts and splits only the last.
  equal,   ///< Every prefill gets the same share of every chunk.
  paged,   ///< No chunks: attention reads context and new tokens from their blocks.
};

struct ContextPlanInput {
  ContextPlanKind kind = ContextPlanKind::packed;
  AttentionVariant variant;
  std::vector<std::int32_t> context_lens;     ///< [prefills]
  std::vector<std::int32_t> query_start_loc;  ///< [prefills + 1], from 0.
  std::int64_t workspace_rows = 0;
  std::int64_t block_size = 1;
  bool align_chunk_to_block = true;         ///< Splits fall on block borders.
  std::int64_t query_tile = 1;              ///< Query rows of a PrefillTile, at most.
  bool token_to_seq = false;                ///< Fill the arrays of that name.
  std::optional<ContextParallel> parallel;  ///< Packed only.
};

/// The spans of each chunk; needs neither query_start_loc nor query_tile.
/// Packed: the spans of a request are disjoint, in order and cover its context from the multiple of
/// the alignment before the first key that its queries see; none is empty; only the first span of a
/// chunk starts later and only the last ends early, at a multiple of the alignment; a chunk's
/// requests are consecutive and see context; its rows fit.
/// Equal: chunk i holds for every request what the same part of its context has in [i * share,
/// (i + 1) * share), which may be nothing; share is a multiple of the alignment. Chunks before
/// every request's part are left out. Paged: nothing. Throws Error(invalid_argument) when the
/// workspace is too small for one aligned piece, of every request with context in the equal plan;
/// Error(unsupported) on another plan than the packed one with `parallel`.
std::vector<std::vector<ContextSpan>> plan_context_spans(const ContextPlanInput& input);

/// Chunks with everything that gather, expansion, attention and merge need. Empty without context.
std::vector<ContextChunk> plan_context_chunks(const ContextPlanInput& input);

// ---------------------------------------------------------------- split KV

/// All query rows of one request against keys [kv_begin, kv_end).
struct WorkItem {
  std::int32_t request = 0;
  std::int32_t kv_begin = 0;
  std::int32_t kv_end = 0;
  /// Where the partial goes; -1: the request has one item, which writes the final output.
  std::int32_t partial = -1;
  bool operator==(const WorkItem&) const = default;
};

/// Decode work, cut so that every worker has the same amount of keys x query rows. Item ranges of a
/// request are disjoint, in order, and cover its keys from the tile that holds the first visible
/// one on; requests without keys have one empty item, requests without query rows none. Items are
/// in order of requests, then of keys.
struct DecodeSchedule {
  std::vector<std::int32_t> query_start_loc;  ///< [decodes + 1]
  std::vector<std::int32_t> seq_lens;         ///< [decodes] keys, the query tokens' own included.
  std::vector<std::uint64_t> draft_tree;      ///< Of SequenceBatch, the decodes' part.
  std::vector<WorkItem> items;
  std::vector<std::int32_t> worker_begin;   ///< [workers + 1] into items; a worker may have none.
  std::vector<std::int32_t> partial_begin;  ///< [decodes + 1] partials of each request.
  std::int32_t max_query_len = 0;
  /// Optional, of a GPU: [decodes] lengths in its memory, which kernels read when they run, so that
  /// a replayed graph sees what is there by then. seq_lens are then the most that they may be; 0
  /// is a request that sees nothing. The block table must be in the GPU's memory too.
  const std::int32_t* device_seq_lens = nullptr;
  std::int32_t num_partials() const { return partial_begin.empty() ? 0 : partial_begin.back(); }
};

/// Enough for a merge to cost little beside its keys, few enough for a long request to be spread.
inline constexpr std::int32_t kInvariantSplitKeys = 1024;

/// What a machine can do at once, as plain data.
struct PlanTarget {
  std::int32_t num_workers = 1;      ///< Threads or multiprocessors.
  std::int32_t decode_kv_tile = 64;  ///< Splits fall on multiples of it.
  std::int32_t prefill_query_tile = 64;
  bool token_to_seq = false;      ///< The context gather finds a row's request in an array.
  bool non_causal_decode = true;  ///< The decode kernel takes non-causal query blocks.
  /// Items of a decode end at multiples of kInvariantSplitKeys of their request's keys, or with
  /// them, whatever the batch and num_workers: more merges, and workers that are less even.
  bool batch_invariant = false;
};

/// Takes any lengths, also fewer keys than query tokens and no keys at all. `variant` says which
/// keys are left out: those before every query's window or chunk. `draft_tree` as in SequenceBatch.
DecodeSchedule schedule_decode(std::span<const std::int32_t> query_start_loc,
                               std::span<const std::int32_t> seq_lens, const PlanTarget& target,
                               const AttentionVariant& variant = {},
                               std::span<const std::uint64_t> draft_tree = {});

/// PrefillSchedule's fields of these names.
struct PrefillPositions {
  std::vector<std::int32_t> first_query;
  std::vector<std::int32_t> first_key;
};

/// `variant` weighs the tiles: under a causal mask the last rows of a request see the most.
PrefillSchedule schedule_prefill(std::span<const std::int32_t> cu_seqlens_q,
                                 std::span<const std::int32_t> cu_seqlens_k,
                                 std::int64_t query_tile, const AttentionVariant& variant = {},
                                 PrefillPositions positions = {});

// ---------------------------------------------------------------- the whole step

/// A step's raw input. Decodes come first (see reorder_swaps).
struct SequenceBatch {
  std::vector<std::int32_t> query_start_loc;  ///< [requests + 1], from 0, not decreasing.
  /// [requests] context + query tokens. Of a request without query tokens (padding, or one that has
  /// nothing to do in this step) no key is read, whatever its length.
  std::vector<std::int32_t> seq_lens;
  /// [requests], optional: the request still reads its prompt.
  std::vector<std::uint8_t> is_prefilling;
  /// [query tokens], optional: the query tokens of each decode form a tree of drafts. Bit j of a
  /// token's entry: it sees the request's query token j. It sees itself and its ancestors, all of
  /// which come before it, and its position is the context length plus their number. Causal
  /// variants only; at most 64 query tokens per request. A chain has entries 1, 3, 7, ...
  std::vector<std::uint64_t> draft_tree;
  std::int32_t num_reqs() const { return static_cast<std::int32_t>(seq_lens.size()); }
};

struct PlanOptions {
  SplitPolicy split;
  AttentionVariant variant;  ///< Non-causal: decodes in uniform blocks only.
  ContextPlanKind context_plan = ContextPlanKind::packed;
  std::int64_t workspace_rows = 64 * 1024;  ///< Not read with ContextPlanKind::paged.
  std::int64_t block_size = 16;
  bool align_chunk_to_block = true;
  std::optional<ContextParallel> parallel;  ///< Of the context chunks; all lengths stay global.
};

/// Everything about one step for one KV group; immutable once made, shared by all its layers.
struct BatchPlan {
  BatchSplit split;
  AttentionVariant variant;
  std::int32_t num_actual_tokens = 0;
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;
  DecodeSchedule decode;  ///< The first split.num_decodes requests.
  /// New tokens among themselves; with ContextPlanKind::paged against all keys of their sequence.
  /// Requests and rows count from the first prefill.
  PrefillSchedule prefill;
  /// Context is read from the blocks: ContextPlanKind::paged.
  bool paged_context = false;
  std::vector<std::int32_t> context_lens;  ///< [prefills]; 0 without query tokens.
  std::vector<ContextChunk> chunks;
  /// Query token ranges of prefills that see no context, whose context partial is (0, -inf). Empty
  /// without chunks.
  std::vector<IndexRange> empty_token_slices;
  /// The most context rows that one chunk gathers: what the step uses of the workspace.
  std::int32_t peak_context_rows = 0;

  bool has_context() const { return !chunks.empty(); }
  /// The only chunk's partial is the context partial of all prefill tokens: nothing to initialise
  /// or merge.
  bool single_context_partial() const { return chunks.size() == 1 && empty_token_slices.empty(); }
  std::string to_text() const;
  std::string to_json() const;
};

/// Throws Error(invalid_argument) that names the field on negative or inconsistent lengths, on more
/// query tokens than seq_len, on a batch that is not ordered, and on options that do not fit.
BatchPlan make_plan(const SequenceBatch& batch, const PlanTarget& target,
                    const PlanOptions& options);

}  // namespace fovea
