// What gather, expansion, attention and merge of each context chunk need.
#include <algorithm>
#include <span>
#include <utility>

#include "core/check.h"
#include "fovea/plan.h"
#include "plan/context_spans.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

using Spans = std::span<const ContextSpan>;

/// Entry i, repeated lens[i] times, for all i.
std::vector<std::int32_t> repeat_indices(std::span<const std::int32_t> lens, std::int32_t total) {
  std::vector<std::int32_t> indices;
  indices.reserve(static_cast<std::size_t>(total));
  for (std::size_t i = 0; i < lens.size(); ++i) {
    indices.insert(indices.end(), static_cast<std::size_t>(lens[i]), static_cast<std::int32_t>(i));
  }
  return indices;
}

std::vector<std::int32_t> cumulate(std::span<const std::int32_t> lens) {
  std::vector<std::int32_t> offsets;
  offsets.reserve(lens.size() + 1);
  offsets.push_back(0);
  for (const std::int32_t len : lens) offsets.push_back(offsets.back() + len);
  return offsets;
}

ContextParallelChunk make_parallel_chunk(const ContextPlanInput& input, Spans spans) {
  const ContextParallel& parallel = *input.parallel;
  ContextParallelChunk chunk;
  for (const ContextSpan& span : spans) {
    chunk.local_starts.push_back(
        static_cast<std::int32_t>(padded_local_length(span.start, parallel)));
    chunk.padded_local_seq_lens.push_back(
        static_cast<std::int32_t>(span_rows(input, span.start, span.seq_len)));
    std::vector<std::int32_t>& lens = chunk.local_context_lens_all_ranks.emplace_back();
    const std::int32_t context_len = input.context_lens[static_cast<std::size_t>(span.request)];
    for (std::int32_t rank = 0; rank < parallel.ranks; ++rank) {
      lens.push_back(static_cast<std::int32_t>(local_length(context_len, parallel, rank)));
    }
  }
  chunk.padded_local_cu_seq_lens = cumulate(chunk.padded_local_seq_lens);
  chunk.num_local_context_tokens = chunk.padded_local_cu_seq_lens.back();
  if (input.token_to_seq) {
    chunk.padded_local_token_to_seq =
        repeat_indices(chunk.padded_local_seq_lens, chunk.num_local_context_tokens);
  }
  return chunk;
}

/// Query tokens up to here have a partial already. The equal plan runs the rows of all requests in
/// every chunk; the packed one returns only to the request that the chunk before it cut.
std::int32_t find_merge_end(const ContextChunk& chunk, ContextPlanKind kind) {
  if (!chunk.is_continuation) return chunk.tokens.begin;
  return kind == ContextPlanKind::equal ? chunk.tokens.end : chunk.continuation_token_end;
}

ContextChunk make_chunk(const ContextPlanInput& input, Spans spans, std::size_t index) {
  const auto first = static_cast<std::size_t>(spans.front().request);
  const std::span<const std::int32_t> offsets =
      std::span(input.query_start_loc).subspan(first, spans.size() + 1);

  ContextChunk chunk;
  chunk.index = static_cast<std::int32_t>(index);
  chunk.requests = {spans.front().request, spans.back().request + 1};
  chunk.tokens = {offsets.front(), offsets.back()};
  chunk.continuation_token_end = offsets[1];
  chunk.is_continuation = input.kind == ContextPlanKind::equal
                              ? index > 0
                              : spans.front().start > context_begin(input, first);
  chunk.merge_end = find_merge_end(chunk, input.kind);
  chunk.starts.reserve(spans.size());
  chunk.seq_lens.reserve(spans.size());
  for (const ContextSpan& span : spans) {
    chunk.starts.push_back(span.start);
    chunk.seq_lens.push_back(span.seq_len);
  }
  std::vector<std::int32_t> cu_seqlens_q;
  cu_seqlens_q.reserve(offsets.size());
  for (const std::int32_t offset : offsets) cu_seqlens_q.push_back(offset - offsets.front());
  const std::vector<std::int32_t> cu_seqlens_k = cumulate(chunk.seq_lens);
  // Queries stand behind the whole context, however little of it the chunk has.
  PrefillPositions positions;
  for (const ContextSpan& span : spans) {
    positions.first_query.push_back(input.context_lens[static_cast<std::size_t>(span.request)]);
    positions.first_key.push_back(span.start);
  }
  chunk.schedule = schedule_prefill(cu_seqlens_q, cu_seqlens_k, input.query_tile, input.variant,
                                    std::move(positions));
  chunk.num_context_tokens = cu_seqlens_k.back();
  if (input.token_to_seq) {
    chunk.token_to_seq = repeat_indices(chunk.seq_lens, chunk.num_context_tokens);
  }
  if (input.parallel) chunk.parallel = make_parallel_chunk(input, spans);
  return chunk;
}

}  // namespace

std::vector<ContextChunk> plan_context_chunks(const ContextPlanInput& input) {
  check_offsets("query_start_loc", input.query_start_loc);
  FOVEA_CHECK(input.query_start_loc.size() == input.context_lens.size() + 1, invalid_argument,
              "query_start_loc has {} entries, must have {}: one more than context_lens",
              input.query_start_loc.size(), input.context_lens.size() + 1);
  const std::vector<std::vector<ContextSpan>> spans = plan_context_spans(input);
  std::vector<ContextChunk> chunks;
  chunks.reserve(spans.size());
  for (std::size_t i = 0; i < spans.size(); ++i) chunks.push_back(make_chunk(input, spans[i], i));
  return chunks;
}

}  // namespace fovea
