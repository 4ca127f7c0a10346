// A plan for programs: every field under its own name.
#include <nlohmann/json.hpp>

#include "fovea/plan.h"

namespace fovea {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const IndexRange& r) { return Json::array({r.begin, r.end}); }

Json to_json(const PrefillSchedule& schedule) {
  Json tiles = Json::array();
  for (const PrefillTile& tile : schedule.tiles) {
    tiles.push_back({{"request", tile.request},
                     {"query_begin", tile.query_begin},
                     {"query_end", tile.query_end}});
  }
  return {{"cu_seqlens_q", schedule.cu_seqlens_q},
          {"cu_seqlens_k", schedule.cu_seqlens_k},
          {"max_query_len", schedule.max_query_len},
          {"max_seq_len", schedule.max_seq_len},
          {"tiles", std::move(tiles)}};
}

Json to_json(const DecodeSchedule& schedule) {
  Json items = Json::array();
  for (const WorkItem& item : schedule.items) {
    items.push_back({{"request", item.request},
                     {"kv_begin", item.kv_begin},
                     {"kv_end", item.kv_end},
                     {"partial", item.partial}});
  }
  return {{"query_start_loc", schedule.query_start_loc},
          {"seq_lens", schedule.seq_lens},
          {"items", std::move(items)},
          {"worker_begin", schedule.worker_begin},
          {"partial_begin", schedule.partial_begin},
          {"max_query_len", schedule.max_query_len},
          {"num_partials", schedule.num_partials()}};
}

Json to_json(const ContextParallelChunk& chunk) {
  return {{"local_starts", chunk.local_starts},
          {"padded_local_seq_lens", chunk.padded_local_seq_lens},
          {"padded_local_cu_seq_lens", chunk.padded_local_cu_seq_lens},
          {"padded_local_token_to_seq", chunk.padded_local_token_to_seq},
          {"local_context_lens_all_ranks", chunk.local_context_lens_all_ranks},
          {"num_local_context_tokens", chunk.num_local_context_tokens}};
}

Json to_json(const ContextChunk& chunk) {
  Json json = {{"index", chunk.index},
               {"requests", to_json(chunk.requests)},
               {"tokens", to_json(chunk.tokens)},
               {"merge_end", chunk.merge_end},
               {"continuation_token_end", chunk.continuation_token_end},
               {"is_continuation", chunk.is_continuation},
               {"starts", chunk.starts},
               {"seq_lens", chunk.seq_lens},
               {"token_to_seq", chunk.token_to_seq},
               {"num_context_tokens", chunk.num_context_tokens},
               {"schedule", to_json(chunk.schedule)}};
  if (chunk.parallel) json["parallel"] = to_json(*chunk.parallel);
  return json;
}

/// Rules that hide nothing are left out.
Json to_json(const AttentionVariant& variant) {
  Json json = {{"causal", variant.causal}};
  if (variant.window_left >= 0) json["window_left"] = variant.window_left;
  if (variant.attention_chunk > 0) json["attention_chunk"] = variant.attention_chunk;
  if (variant.soft_cap > 0) json["soft_cap"] = variant.soft_cap;
  return json;
}

}  // namespace

std::string BatchPlan::to_json() const {
  Json chunk_list = Json::array();
  for (const ContextChunk& chunk : chunks) chunk_list.push_back(fovea::to_json(chunk));
  Json slices = Json::array();
  for (const IndexRange& tokens : empty_token_slices) slices.push_back(fovea::to_json(tokens));
  Json json = {{"split",
                {{"num_decodes", split.num_decodes},
                 {"num_prefills", split.num_prefills},
                 {"num_decode_tokens", split.num_decode_tokens},
                 {"num_prefill_tokens", split.num_prefill_tokens}}},
               {"variant", fovea::to_json(variant)},
               {"num_actual_tokens", num_actual_tokens},
               {"max_query_len", max_query_len},
               {"max_seq_len", max_seq_len},
               {"decode", fovea::to_json(decode)},
               {"prefill", fovea::to_json(prefill)},
               {"context_lens", context_lens},
               {"chunks", std::move(chunk_list)},
               {"empty_token_slices", std::move(slices)},
               {"peak_context_rows", peak_context_rows}};
  if (paged_context) json["paged_context"] = true;
  return json.dump(2);
}

}  // namespace fovea
