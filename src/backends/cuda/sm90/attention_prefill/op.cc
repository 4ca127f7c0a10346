#include "backends/cuda/sm90/attention_prefill/op.h"

#include <algorithm>
#include <limits>

#include "backends/cuda/launch.h"
#include "backends/cuda/sm90/attention_prefill/attention_prefill.h"
#include "backends/cuda/upload.h"
#include "plan/extents.h"

namespace fovea::cuda::sm90 {
namespace {

using Operands = cuda::PrefillParams;

/// What the kernel has no code for. The rest is attention_prefill_sm90_declines's.
const char* why_not(const AttentionPrefillParams& p) {
  // Items are counted in 32 bits, and there are at most as many as rows times heads.
  if (p.q.shape[0] * p.q.shape[1] > std::numeric_limits<std::int32_t>::max()) {
    return "query tokens times heads must fit 32 bits";
  }
  for (const TensorView* view : {&p.q, &p.k, &p.v, &p.out}) {
    if (view->ndim > 0 && view->shape[2] > 1 && view->strides[2] != 1) {
      return "rows must have unit innermost strides";
    }
  }
  if (p.k_pe.ndim > 0 && p.k_pe.shape[1] > 1 && p.k_pe.strides[1] != 1) {
    return "rows must have unit innermost strides";
  }
  if (p.sinks.ndim > 0 && p.sinks.strides[0] != 1) return "sinks must be contiguous";
  if (p.paged.k_cache == nullptr) return nullptr;
  for (const PagedKvCache* cache : {p.paged.k_cache, p.paged.v_cache}) {
    const KvFormat& format = cache->format();
    if (format.scales != KvScales::none || format.dtype != p.q.dtype) {
      return "blocks must hold rows of the queries' dtype";
    }
  }
  return nullptr;
}

/// Of [rows, heads, channels], or [rows, channels].
HeadRows rows_of(const TensorView& view) {
  if (view.ndim == 0) return {};
  const int last = view.ndim - 1;
  HeadRows rows{.data = view.data,
                .channels = view.shape[last],
                .block_size = view.shape[0],
                .row_stride = view.strides[0]};
  if (view.ndim == 3) {
    rows.heads = view.shape[1];
    rows.head_stride = view.strides[1];
  }
  return rows;
}

/// Everything but what the plan gives, which is on the host yet.
Operands operands_of(const AttentionPrefillParams& p) {
  const bool is_paged = p.paged.k_cache != nullptr;
  Operands o;
  o.type = element_type(p.q.dtype);
  o.num_heads = static_cast<std::int32_t>(p.q.shape[1]);
  o.num_kv_heads =
      static_cast<std::int32_t>(is_paged ? p.paged.num_kv_heads : p.k.shape[1]);
  o.qk_dim = static_cast<std::int32_t>(p.q.shape[2]);
  o.pe_dim = static_cast<std::int32_t>(p.k_pe.ndim > 0 ? p.k_pe.shape[1] : 0);
  o.v_dim = static_cast<std::int32_t>(p.out.shape[2]);
  o.q = rows_of(p.q);
  o.k = rows_of(p.k);
  o.k_pe = rows_of(p.k_pe);
  o.v = rows_of(p.v);
  if (is_paged) {
    o.k_cache = head_rows(*p.paged.k_cache, o.num_kv_heads, o.qk_dim);
    o.v_cache = head_rows(*p.paged.v_cache, o.num_kv_heads, o.v_dim);
  }
  o.out_type = element_type(p.out.dtype);
  o.out = p.out.data;
  o.out_row_stride = p.out.strides[0];
  o.out_head_stride = p.out.strides[1];
  o.lse = static_cast<float*>(p.lse.data);
  o.lse_head_stride = p.lse.strides[0];
  o.lse_row_stride = p.lse.strides[1];
  o.sm_scale = p.sm_scale;
  o.variant = p.variant;
  o.sinks = static_cast<const float*>(p.sinks.data);
  return o;
}

/// The plan's arrays as the device gets them: the counter, tiles, block table.
struct Image {
  static constexpr std::int64_t kCounterWords = 4;  // Tiles behind it are 16-byte aligned.
  static constexpr std::int64_t kTileWords = sizeof(QueryTile) / sizeof(std::int32_t);

  std::int64_t tiles = 0;
  std::int64_t requests = 0;
  std::int64_t table_width = 0;  ///< Blocks of a request at most.

  explicit Image(const AttentionPrefillParams& p) {
    for (const fovea::PrefillTile& tile : p.schedule->tiles) {
      tiles += (tile.query_end - tile.query_begin + kPrefillQueryTile - 1) / kPrefillQueryTile;
    }
    if (p.paged.k_cache == nullptr) return;
    const std::int64_t block_size = p.paged.k_cache->block_size();
    requests = std::ssize(p.schedule->cu_seqlens_q) - 1;
    table_width = (p.schedule->max_seq_len + block_size - 1) / block_size;
  }
  std::int64_t words() const { return kCounterWords + tiles * kTileWords + requests * table_width; }
};

/// Rows [begin, end) of a request.
QueryTile query_tile(const AttentionPrefillParams& p, std::int32_t request, std::int32_t begin,
                     std::int32_t end) {
  const PrefillSchedule& schedule = *p.schedule;
  const auto r = static_cast<std::size_t>(request);
  const SequenceExtent extent = extent_of(schedule, request);
  const std::int64_t paged = p.paged.k_cache == nullptr ? 0
                             : p.k.data != nullptr      ? extent.num_keys - extent.num_queries
                                                        : extent.num_keys;
  return {.query_row = schedule.cu_seqlens_q[r] + begin,
          .num_rows = end - begin,
          .position = static_cast<std::int32_t>(extent.first_query) + begin,
          .num_keys = static_cast<std::int32_t>(extent.num_keys),
          .first_key = static_cast<std::int32_t>(extent.first_key),
          .num_paged = static_cast<std::int32_t>(paged),
          .first_row = p.paged.k_cache ? schedule.cu_seqlens_q[r] : schedule.cu_seqlens_k[r],
          .request = request};
}

void put_tiles(const AttentionPrefillParams& p, Upload& image) {
  for (const fovea::PrefillTile& tile : p.schedule->tiles) {
    // Of a longer tile the last rows first: they see the most.
    for (std::int32_t end = tile.query_end; end > tile.query_begin;) {
      const std::int32_t rows = (end - tile.query_begin - 1) % kPrefillQueryTile + 1;
      const QueryTile t = query_tile(p, tile.request, end - rows, end);
      for (const std::int32_t word : {t.query_row, t.num_rows, t.position, t.num_keys, t.first_key,
                                      t.num_paged, t.first_row, t.request}) {
        image.put(word);
      }
      end -= rows;
    }
  }
}

/// Entries that no key needs may hold anything, or not be there.
void put_table(const AttentionPrefillParams& p, const Image& shape, Upload& image) {
  const BlockTableView& table = p.paged.block_table;
  for (std::int32_t r = 0; r < shape.requests; ++r) {
    const std::int64_t keys = extent_of(*p.schedule, r).num_keys;
    for (std::int64_t b = 0; b < shape.table_width; ++b) {
      const bool used = b * p.paged.k_cache->block_size() < keys && b < table.width;
      image.put(used ? table.data[r * table.stride + b] : 0);
    }
  }
}

}  // namespace

const char* attention_prefill_declines(const AttentionPrefillParams& p) {
  const char* reason = why_not(p);
  return reason ? reason : attention_prefill_sm90_declines(operands_of(p));
}

std::int64_t attention_prefill_scratch(const OpContext&, const AttentionPrefillParams& p) {
  return Workspace::rounded(Image(p).words() * std::int64_t{sizeof(std::int32_t)});
}

void attention_prefill(const OpContext& ctx, const AttentionPrefillParams& p) {
  const CurrentDevice current(ctx.memory.device);
  const Image shape(p);
  Operands operands = operands_of(p);
  WorkspaceScope scope(*ctx.workspace);
  Upload image(scope.take<std::int32_t>(shape.words()), stream_of(ctx));
  operands.counter = reinterpret_cast<std::uint32_t*>(image.next());
  for (int i = 0; i < Image::kCounterWords; ++i) image.put(0);
  operands.tiles = reinterpret_cast<const QueryTile*>(image.next());
  operands.num_tiles = static_cast<std::int32_t>(shape.tiles);
  put_tiles(p, image);
  operands.block_table = image.next();
  operands.block_table_stride = shape.table_width;
  put_table(p, shape, image);
  image.send();
  operands.heads_at_once = prefill_heads_at_once(operands, p.schedule->max_seq_len);
  check(attention_prefill_sm90(operands, stream_of(ctx)), "attention_prefill");
}

}  // namespace fovea::cuda::sm90
