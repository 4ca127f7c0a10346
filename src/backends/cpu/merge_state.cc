#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/attend.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rows.h"

namespace fovea::cpu {
namespace {

void fill_zero(const Kernels& kernels, std::int64_t n, const Row& dst) {
  alignas(64) const float zeros[kRowChunk] = {};
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    store_row(kernels, zeros, 1.f, std::min(kRowChunk, n - i), dst.from(i));
  }
}

/// One query of one head: a partial output and its lse.
struct Part {
  Row out;
  float lse;
  bool empty() const { return std::isinf(lse); }
};

/// What a sink leaves of the weights that `lse` is of.
float share_beside(float sink, float lse) {
  return sink == kNoSink ? 1.f : 1.f / (1.f + std::exp(sink - lse));
}

/// dst = src * factor.
void scale_row(const Kernels& kernels, const Row& src, float factor, std::int64_t n,
               const Row& dst) {
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, n - i);
    alignas(64) float values[kRowChunk];
    load_row(kernels, src.from(i), count, values);
    store_row(kernels, values, factor, count, dst.from(i));
  }
}

/// Writes the merged output; returns its lse. Each chunk is read from both parts before it is
/// written, so that `out` may be either.
float merge_row(const Kernels& kernels, const Part& a, const Part& b, float sink, std::int64_t n,
                const Row& out) {
  if (a.empty() && b.empty()) {
    fill_zero(kernels, n, out);
    return -std::numeric_limits<float>::infinity();
  }
  if (a.empty() || b.empty()) {
    const Part& part = a.empty() ? b : a;
    if (sink == kNoSink) {
      copy_row(kernels, part.out, n, out);
    } else {
      scale_row(kernels, part.out, share_beside(sink, part.lse), n, out);
    }
    return part.lse;
  }
  const float origin = std::max(a.lse, b.lse);
  const float weight_a = std::exp(a.lse - origin);
  const float weight_b = std::exp(b.lse - origin);
  const float sum = weight_a + weight_b;
  const float lse = origin + std::log(sum);
  const float factor = share_beside(sink, lse) / sum;
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    const std::int64_t count = std::min(kRowChunk, n - i);
    alignas(64) float values[kRowChunk];
    alignas(64) float merged[kRowChunk] = {};
    load_row(kernels, a.out.from(i), count, values);
    kernels.add_weighted(values, weight_a, count, merged);
    load_row(kernels, b.out.from(i), count, values);
    kernels.add_weighted(values, weight_b, count, merged);
    store_row(kernels, merged, factor, count, out.from(i));
  }
  return lse;
}

}  // namespace

void merge_state(const Kernels& kernels, const OpContext& ctx, const MergeStateParams& params) {
  const std::int64_t tokens = params.prefix.out.shape[0];
  const std::int64_t heads = params.prefix.out.shape[1];
  const std::int64_t width = params.prefix.out.shape[2];
  const auto part_of = [](const AttentionState& state, std::int64_t t, std::int64_t n) {
    return Part{row_of(state.out, {t, n}), *state.lse.ptr<float>({n, t})};
  };
  const auto merge_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t n = 0; n < heads; ++n) {
        const float sink = params.sinks ? *params.sinks.ptr<float>({n}) : kNoSink;
        const float lse =
            merge_row(kernels, part_of(params.prefix, t, n), part_of(params.suffix, t, n), sink,
                      width, row_of(params.result.out, {t, n}));
        if (params.result.lse) *params.result.lse.ptr<float>({n, t}) = lse;
      }
    }
  };
  for_row_ranges(*ctx.pool, tokens, heads * width, merge_tokens);
}

}  // namespace fovea::cpu
