// A plan for people.
#include <fmt/format.h>

#include <iterator>

#include "fovea/plan.h"

namespace fovea {
namespace {

using Buffer = fmt::memory_buffer;

template <class... Args>
void append(Buffer& out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

std::string range(std::int32_t begin, std::int32_t end) {
  return fmt::format("[{}, {})", begin, end);
}
std::string range(const IndexRange& r) { return range(r.begin, r.end); }

void append_decode(Buffer& out, const DecodeSchedule& decode) {
  append(out, "decode: {} items, {} partials\n", decode.items.size(), decode.num_partials());
  for (std::size_t i = 0; i < decode.seq_lens.size(); ++i) {
    append(out, "  request {}: tokens {}, {} keys\n", i,
           range(decode.query_start_loc[i], decode.query_start_loc[i + 1]), decode.seq_lens[i]);
  }
  for (std::size_t w = 0; w + 1 < decode.worker_begin.size(); ++w) {
    append(out, "  worker {}:", w);
    const std::int32_t end = decode.worker_begin[w + 1];
    if (decode.worker_begin[w] == end) append(out, " nothing");
    for (std::int32_t i = decode.worker_begin[w]; i < end; ++i) {
      const WorkItem& item = decode.items[static_cast<std::size_t>(i)];
      append(out, "{} request {} keys {}", i == decode.worker_begin[w] ? "" : ",", item.request,
             range(item.kv_begin, item.kv_end));
      if (item.partial >= 0) append(out, " to partial {}", item.partial);
    }
    append(out, "\n");
  }
}

void append_prefill(Buffer& out, const BatchPlan& plan) {
  const PrefillSchedule& prefill = plan.prefill;
  append(out, "prefill: {} tiles; requests and tokens count from the first prefill\n",
         prefill.tiles.size());
  for (std::size_t i = 0; i < plan.context_lens.size(); ++i) {
    append(out, "  request {}: tokens {}, context {}\n", i,
           range(prefill.cu_seqlens_q[i], prefill.cu_seqlens_q[i + 1]), plan.context_lens[i]);
  }
  for (const PrefillTile& tile : prefill.tiles) {
    append(out, "  tile: request {} query rows {}\n", tile.request,
           range(tile.query_begin, tile.query_end));
  }
}

void append_chunk(Buffer& out, const ContextChunk& chunk) {
  append(out, "  chunk {}: requests {}, tokens {}, {} rows, {} tiles", chunk.index,
         range(chunk.requests), range(chunk.tokens), chunk.num_context_tokens,
         chunk.schedule.tiles.size());
  if (chunk.parallel) {
    append(out, ", {} padded local rows", chunk.parallel->num_local_context_tokens);
  }
  if (chunk.merge_end > chunk.tokens.begin) {
    append(out, ", merges tokens {}", range(chunk.tokens.begin, chunk.merge_end));
  }
  if (chunk.merge_end < chunk.tokens.end) {
    append(out, ", writes tokens {}", range(chunk.merge_end, chunk.tokens.end));
  }
  append(out, "\n");
  for (std::size_t i = 0; i < chunk.starts.size(); ++i) {
    append(out, "    request {}: context {}", chunk.requests.begin + static_cast<std::int32_t>(i),
           range(chunk.starts[i], chunk.starts[i] + chunk.seq_lens[i]));
    if (chunk.parallel) {
      const std::int32_t start = chunk.parallel->local_starts[i];
      append(out, ", padded local rows {}",
             range(start, start + chunk.parallel->padded_local_seq_lens[i]));
    }
    append(out, "\n");
  }
}

}  // namespace

std::string BatchPlan::to_text() const {
  Buffer out;
  append(out, "batch: {} decodes ({} tokens), {} prefills ({} tokens), {}\n", split.num_decodes,
         split.num_decode_tokens, split.num_prefills, split.num_prefill_tokens,
         variant.causal ? "causal" : "not causal");
  if (variant.window_left >= 0) {
    append(out, "window: {} keys before each query\n", variant.window_left);
  }
  if (variant.attention_chunk > 0) append(out, "attention chunks: {}\n", variant.attention_chunk);
  if (variant.soft_cap > 0) append(out, "soft cap: {}\n", variant.soft_cap);
  if (paged_context) append(out, "context: read from its blocks\n");
  append(out, "longest: {} query tokens, {} keys\n", max_query_len, max_seq_len);
  if (split.num_decodes > 0) append_decode(out, decode);
  if (split.num_prefills > 0) append_prefill(out, *this);
  if (has_context()) {
    append(out, "context: {} chunks, at most {} workspace rows\n", chunks.size(),
           peak_context_rows);
    for (const ContextChunk& chunk : chunks) append_chunk(out, chunk);
    for (const IndexRange& tokens : empty_token_slices) {
      append(out, "  no context: tokens {}\n", range(tokens));
    }
  }
  return fmt::to_string(out);
}

}  // namespace fovea
