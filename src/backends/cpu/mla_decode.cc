#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "backends/cpu/attend.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/paged_rows.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {
namespace {

/// Extents and scratch sizes of a call.
struct Sizes {
  explicit Sizes(const MlaDecodeParams& params)
      : heads(params.q_latent.shape[1]),
        requests(static_cast<std::int64_t>(params.schedule->seq_lens.size())),
        workers(static_cast<std::int64_t>(params.schedule->worker_begin.size()) - 1),
        partials(params.schedule->num_partials()),
        request_rows(params.schedule->max_query_len * heads),
        shape{.qk_channels = params.q_latent.shape[2] + params.q_pe.shape[2],
              .v_channels = params.q_latent.shape[2],
              .max_rows = std::min(request_rows, kMaxRows),
              .values_in_keys = true} {}

  std::int64_t heads;
  std::int64_t requests;
  std::int64_t workers;
  std::int64_t partials;
  std::int64_t request_rows;  ///< Most rows, heads times query tokens, of a request.
  AttendShape shape;
};

/// Keys, and in their first channels values, of one request.
class LatentRows {
 public:
  LatentRows(const Kernels& kernels, const MlaDecodeParams& params, std::int32_t request)
      : kernels_(kernels),
        rows_(*params.cache, params.block_table, request),
        width_(params.cache->format().row_elements) {}

  void load(AttendState& state, const KeyInterval& tile) const {
    rows_.for_each(tile, [&](std::int64_t position, const Row& row) {
      load_row(kernels_, row, width_, state.key(position - tile.begin));
    });
  }
  void prefetch(const KeyInterval& tile) const {
    rows_.for_each(tile, [&](std::int64_t, const Row& row) { prefetch_row(row, width_); });
  }

 private:
  const Kernels& kernels_;
  PagedRows rows_;
  std::int64_t width_;
};

/// One run. Rows of a request are [query token][head].
class MlaDecode {
 public:
  MlaDecode(const Kernels& kernels, const MlaDecodeParams& params, WorkspaceScope& scope)
      : kernels_(kernels), params_(params), schedule_(*params.schedule), sizes_(params) {
    state_bytes_ = AttendState::bytes(sizes_.shape);
    states_ = scope.take_bytes(sizes_.workers * state_bytes_);
    if (sizes_.partials == 0) return;
    const std::int64_t rows = sizes_.partials * sizes_.request_rows;
    partial_out_ = scope.take<float>(rows * sizes_.shape.v_channels);
    partial_lse_ = scope.take<float>(rows);
    arrived_ = scope.take<std::int32_t>(sizes_.requests);
    std::fill_n(arrived_, sizes_.requests, 0);
  }

  std::int64_t workers() const { return sizes_.workers; }

  void run_worker(std::int64_t worker) {
    AttendState state(kernels_, sizes_.shape, states_ + worker * state_bytes_);
    const auto w = static_cast<std::size_t>(worker);
    for (std::int32_t i = schedule_.worker_begin[w]; i < schedule_.worker_begin[w + 1]; ++i) {
      const WorkItem& item = schedule_.items[static_cast<std::size_t>(i)];
      run_item(state, item);
      if (item.partial >= 0 && is_last_to_arrive(item.request)) combine(item.request);
    }
  }

 private:
  std::int64_t first_token(std::int32_t request) const {
    return schedule_.query_start_loc[static_cast<std::size_t>(request)];
  }
  std::int64_t query_len(std::int32_t request) const {
    return schedule_.query_start_loc[static_cast<std::size_t>(request) + 1] - first_token(request);
  }

  void run_item(AttendState& state, const WorkItem& item) {
    const LatentRows latents(kernels_, params_, item.request);
    const std::int64_t rows = query_len(item.request) * sizes_.heads;
    for (std::int64_t first = 0; first < rows; first += sizes_.shape.max_rows) {
      const std::int64_t count = std::min(sizes_.shape.max_rows, rows - first);
      attend_rows(state, item, first, count, latents);
    }
  }

  void attend_rows(AttendState& state, const WorkItem& item, std::int64_t first, std::int64_t count,
                   const LatentRows& latents) {
    state.begin(count);
    for (std::int64_t r = 0; r < count; ++r) load_query(state, item.request, first + r, r);
    const QueryRows queries{.count = count,
                            .rows_per_query = sizes_.heads,
                            .first_row = first,
                            .extent = {query_len(item.request),
                                       schedule_.seq_lens[static_cast<std::size_t>(item.request)]}};
    attend_keys(state, queries, params_.variant, {item.kv_begin, item.kv_end}, latents);
    for (std::int64_t r = 0; r < count; ++r) {
      if (item.partial >= 0) {
        const std::int64_t row = item.partial * sizes_.request_rows + first + r;
        const Row out = row_of(partial_out_ + row * sizes_.shape.v_channels);
        partial_lse_[row] = state.finish(r, out);
      } else {
        write_lse(item.request, first + r, state.finish(r, out_row(item.request, first + r)));
      }
    }
  }

  /// Row `row` of the request, [latent | rope], as row `r` of the state.
  void load_query(AttendState& state, std::int32_t request, std::int64_t row, std::int64_t r) {
    const std::int64_t t = first_token(request) + row / sizes_.heads;
    const std::int64_t n = row % sizes_.heads;
    const std::int64_t latent = sizes_.shape.v_channels;
    float* query = state.query_buffer();
    load_row(kernels_, row_of(params_.q_latent, {t, n}), latent, query);
    load_row(kernels_, row_of(params_.q_pe, {t, n}), sizes_.shape.qk_channels - latent,
             query + latent);
    state.set_query(r, params_.sm_scale * std::numbers::log2e_v<float>);
  }

  Row out_row(std::int32_t request, std::int64_t row) const {
    const std::int64_t t = first_token(request) + row / sizes_.heads;
    return row_of(params_.out, {t, row % sizes_.heads});
  }
  void write_lse(std::int32_t request, std::int64_t row, float lse) const {
    if (!params_.lse) return;
    const std::int64_t t = first_token(request) + row / sizes_.heads;
    *params_.lse.ptr<float>({row % sizes_.heads, t}) = lse;
  }

  KeyInterval partials_of(std::int32_t request) const {
    const auto r = static_cast<std::size_t>(request);
    return {schedule_.partial_begin[r], schedule_.partial_begin[r + 1]};
  }

  /// Who comes last sees what all others of the request wrote.
  bool is_last_to_arrive(std::int32_t request) {
    std::atomic_ref<std::int32_t> arrived(arrived_[request]);
    return arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == partials_of(request).size();
  }

  void combine(std::int32_t request) const {
    const KeyInterval partials = partials_of(request);
    const std::int64_t rows = query_len(request) * sizes_.heads;
    for (std::int64_t row = 0; row < rows; ++row) {
      write_lse(request, row, combine_row(partials, row, out_row(request, row)));
    }
  }

  /// The partials in their order, so that no bit depends on who came last. Returns the lse.
  float combine_row(const KeyInterval& partials, std::int64_t row, const Row& out) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const auto lse_of = [&](std::int64_t p) { return partial_lse_[p * sizes_.request_rows + row]; };
    float largest = kNone;
    for (std::int64_t p = partials.begin; p < partials.end; ++p) {
      largest = std::max(largest, lse_of(p));
    }
    // Without any key: a finite origin, so that weights and sum are 0.
    const float origin = largest == kNone ? 0.f : largest;
    float sum = 0.f;
    for (std::int64_t p = partials.begin; p < partials.end; ++p)
      sum += std::exp(lse_of(p) - origin);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;

    const std::int64_t width = sizes_.shape.v_channels;
    for (std::int64_t c = 0; c < width; c += kRowChunk) {
      const std::int64_t count = std::min(kRowChunk, width - c);
      alignas(64) float total[kRowChunk] = {};
      for (std::int64_t p = partials.begin; p < partials.end; ++p) {
        const float* values = partial_out_ + (p * sizes_.request_rows + row) * width + c;
        kernels_.add_weighted(values, std::exp(lse_of(p) - origin), count, total);
      }
      store_row(kernels_, total, inverse, count, out.from(c));
    }
    return sum == 0.f ? kNone : origin + std::log(sum);
  }

  const Kernels& kernels_;
  const MlaDecodeParams& params_;
  const DecodeSchedule& schedule_;
  Sizes sizes_;
  std::int64_t state_bytes_;
  std::byte* states_;                ///< [workers][state_bytes]
  float* partial_out_ = nullptr;     ///< [partials][request_rows][L]
  float* partial_lse_ = nullptr;     ///< [partials][request_rows]
  std::int32_t* arrived_ = nullptr;  ///< [requests] partials that are done.
};

}  // namespace

std::int64_t mla_decode_bytes(const OpContext&, const MlaDecodeParams& params) {
  const Sizes sizes(params);
  std::int64_t bytes = Workspace::rounded(sizes.workers * AttendState::bytes(sizes.shape));
  if (sizes.partials == 0) return bytes;
  const std::int64_t rows = sizes.partials * sizes.request_rows;
  bytes += Workspace::rounded(rows * sizes.shape.v_channels * std::int64_t{sizeof(float)});
  bytes += Workspace::rounded(rows * std::int64_t{sizeof(float)});
  bytes += Workspace::rounded(sizes.requests * std::int64_t{sizeof(std::int32_t)});
  return bytes;
}

void mla_decode(const Kernels& kernels, const OpContext& ctx, const MlaDecodeParams& params) {
  WorkspaceScope scope(*ctx.workspace);
  MlaDecode decode(kernels, params, scope);
  ctx.pool->run(decode.workers(), [&](std::int64_t worker) { decode.run_worker(worker); });
}

}  // namespace fovea::cpu
