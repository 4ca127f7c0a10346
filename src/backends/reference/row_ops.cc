// Ops that treat each row alone.
#include <array>
#include <cmath>
#include <cstring>

#include "backends/reference/cached_rows.h"
#include "backends/reference/kernels.h"
#include "backends/reference/rows.h"
#include "ops/index_view.h"
#include "ops/output_rows.h"
#include "ops/rope_angles.h"

namespace fovea::reference {
namespace {

/// Plain rows as elements.
Row row_of_cache(const PagedKvCache& cache, std::byte* row) {
  return {row, cache.format().dtype, 1, cache.format().row_elements};
}

bool is_plain(const PagedKvCache& cache) { return cache.format().scales == KvScales::none; }

/// Values of a head on the way through its codec.
class HeadBuffer {
 public:
  explicit HeadBuffer(const PagedKvCache& cache)
      : elements_(is_plain(cache) ? 0 : cache.format().head_elements()) {}
  Row row() { return {values_.data(), DType::f32, 1, elements_}; }
  std::span<float> values() {
    return std::span(values_).first(static_cast<std::size_t>(elements_));
  }

 private:
  std::int64_t elements_;
  std::array<float, KvFormat::kMaxScaledHead> values_;
};

void encode(const PagedKvCache& cache, std::span<const float> values, std::byte* row,
            std::int64_t head) {
  const std::int64_t bytes = cache.format().head_bytes();
  encode_head(cache.format(), values,
              std::span(row + head * bytes, static_cast<std::size_t>(bytes)));
}

/// `value` as an element of `dtype` holds it.
double rounded(DType dtype, double value) {
  switch (dtype) {
    case DType::f16:
      return widen(narrow<Float16>(static_cast<float>(value)));
    case DType::bf16:
      return widen(narrow<BFloat16>(static_cast<float>(value)));
    default:
      return static_cast<float>(value);
  }
}

/// To `out`, which may be `x`; rounded to x's dtype first.
void norm(const Row& x, const TensorView& weight, float eps, const Row& out) {
  const Row weights{weight.data, weight.dtype, weight.strides[0], weight.shape[0]};
  double sum = 0;
  for (std::int64_t d = 0; d < x.size; ++d) sum += get(x, d) * get(x, d);
  const double mean = sum / static_cast<double>(x.size);
  const double scale = 1 / std::sqrt(mean + static_cast<double>(eps));
  for (std::int64_t d = 0; d < x.size; ++d) {
    set(out, d, rounded(x.dtype, get(x, d) * scale * get(weights, d)));
  }
}

}  // namespace

void rms_norm(const OpContext&, const RmsNormParams& p) {
  for (std::int64_t t = 0; t < p.x.shape[0]; ++t) {
    norm(row_of(p.x, t), p.weight, p.eps, row_of(p.out, t));
  }
}

void add_residual(const OpContext& ctx, const AddResidualParams& p) {
  ctx.pool->run(p.x.shape[0], [&](std::int64_t t) {
    const Row x = row_of(p.x, t), y = row_of(p.y, t);
    const auto scale = static_cast<double>(p.scale);
    for (std::int64_t d = 0; d < x.size; ++d) set(x, d, get(x, d) + scale * get(y, d));
  });
}

namespace {

/// The first R channels of `x`, turned, to `out`, which may be `x`; rounded to x's dtype first.
void rotate(const RopeAngles& angles, std::int64_t token, const Row& x, const Row& out) {
  const std::int64_t pairs = angles.cos_sin.shape[1] / 2;
  const bool neox = angles.pairing == RopePairing::neox;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t axis =
        angles.sections.multi_axis() ? mrope_axis(angles.sections, i) : std::int64_t{0};
    const Row cos_sin = row_of(angles.cos_sin, position_of(angles, token, axis));
    const std::int64_t first = neox ? i : 2 * i;
    const std::int64_t second = neox ? i + pairs : 2 * i + 1;
    const double cos = get(cos_sin, i);
    const double sin = get(cos_sin, pairs + i);
    const double a = get(x, first);
    const double b = get(x, second);
    set(out, first, rounded(x.dtype, a * cos - b * sin));
    set(out, second, rounded(x.dtype, b * cos + a * sin));
  }
}

}  // namespace

void rope(const OpContext&, const RopeParams& p) {
  for (std::int64_t t = 0; t < p.x.shape[0]; ++t) {
    for (std::int64_t n = 0; n < p.x.shape[1]; ++n) {
      const Row x = row_of(p.x, t, n);
      rotate(p.angles, t, x, x);
    }
  }
}

namespace {

/// Heads of one token into a row of the cache, turned by `rope` (optional) in their own dtype
/// first.
void append_heads(const TensorView& heads, std::int64_t t, const RopeAngles* rope,
                  const PagedKvCache& cache, std::byte* row) {
  HeadBuffer buffer(cache);
  const std::int64_t width = heads.shape[2];
  for (std::int64_t h = 0; h < heads.shape[1]; ++h) {
    const Row head = row_of(heads, t, h);
    const Row stored = is_plain(cache)
                           ? part_of(row_of_cache(cache, row), h * width, (h + 1) * width)
                           : buffer.row();
    copy(head, stored);
    if (rope) rotate(*rope, t, head, stored);
    if (!is_plain(cache)) encode(cache, buffer.values(), row, h);
  }
}

}  // namespace

void gqa_append(const OpContext&, const GqaAppendParams& p) {
  for (std::int64_t t = 0; t < p.k.shape[0]; ++t) {
    const std::int64_t slot = index_at(p.slot_mapping, t);
    if (slot == -1) continue;
    append_heads(p.k, t, p.rope.cos_sin ? &p.rope : nullptr, *p.k_cache, p.k_cache->slot(slot));
    append_heads(p.v, t, nullptr, *p.v_cache, p.v_cache->slot(slot));
  }
}

void kv_append(const OpContext&, const KvAppendParams& p) {
  const PagedKvCache& cache = *p.cache;
  const std::int64_t latent = p.kv_c.shape[1];
  HeadBuffer buffer(cache);
  for (std::int64_t t = 0; t < p.kv_c.shape[0]; ++t) {
    const std::int64_t slot = index_at(p.slot_mapping, t);
    if (slot == -1) continue;
    const Row row = is_plain(cache) ? row_of_cache(cache, cache.slot(slot)) : buffer.row();
    const Row kv_c = row_of(p.kv_c, t), k_pe = row_of(p.k_pe, t);
    const Row stored_latent = part_of(row, 0, latent), stored_rope = part_of(row, latent, row.size);
    copy(kv_c, stored_latent);
    copy(k_pe, stored_rope);
    if (p.norm_weight) norm(kv_c, p.norm_weight, p.norm_eps, stored_latent);
    if (p.rope.cos_sin) rotate(p.rope, t, k_pe, stored_rope);
    if (!is_plain(cache)) encode(cache, buffer.values(), cache.slot(slot), 0);
  }
}

void kv_gather(const OpContext&, const KvGatherParams& p) {
  const PagedKvCache& cache = *p.cache;
  const KvFormat& format = cache.format();
  HeadBuffer buffer(cache);
  std::int64_t out_row = 0;
  for (std::size_t i = 0; i < p.seq_lens.size(); ++i) {
    for (std::int64_t k = 0; k < p.seq_lens[i]; ++k, ++out_row) {
      std::byte* stored =
          cached_row(cache, p.block_table, static_cast<std::int64_t>(i), p.starts[i] + k);
      if (p.out.dtype == DType::u8) {
        std::memcpy(p.out.ptr<std::uint8_t>({out_row, 0}), stored,
                    static_cast<std::size_t>(format.row_bytes()));
        continue;
      }
      const Row out = row_of(p.out, out_row);
      if (is_plain(cache)) {
        copy(row_of_cache(cache, stored), out);
        continue;
      }
      const std::int64_t width = format.head_elements();
      for (std::int64_t h = 0; h < format.num_heads; ++h) {
        decode_head(format,
                    std::span(stored + h * format.head_bytes(),
                              static_cast<std::size_t>(format.head_bytes())),
                    buffer.values());
        copy(buffer.row(), part_of(out, h * width, (h + 1) * width));
      }
    }
  }
}

namespace {

/// Bit for bit where the factor is 1.
void copy_scaled(const Row& src, double factor, const Row& dst) {
  if (factor == 1) return copy(src, dst);
  for (std::int64_t d = 0; d < src.size; ++d) set(dst, d, get(src, d) * factor);
}

}  // namespace

void merge_state(const OpContext&, const MergeStateParams& p) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto is_empty = [&](double lse) { return std::abs(lse) == infinity; };
  const std::int64_t width = p.prefix.out.shape[2];
  for (std::int64_t t = 0; t < p.prefix.out.shape[0]; ++t) {
    for (std::int64_t n = 0; n < p.prefix.out.shape[1]; ++n) {
      const Row prefix = row_of(p.prefix.out, t, n);
      const Row suffix = row_of(p.suffix.out, t, n);
      const Row result = row_of(p.result.out, t, n);
      const double prefix_lse = *p.prefix.lse.ptr<float>({n, t});
      const double suffix_lse = *p.suffix.lse.ptr<float>({n, t});
      const double sink = p.sinks ? static_cast<double>(*p.sinks.ptr<float>({n})) : -infinity;
      // What the sink leaves of the weights that `lse` is of.
      const auto share = [&](double lse) { return 1 / (1 + std::exp(sink - lse)); };
      double lse = -infinity;
      if (is_empty(prefix_lse) && is_empty(suffix_lse)) {
        for (std::int64_t d = 0; d < width; ++d) set(result, d, 0);
      } else if (is_empty(suffix_lse)) {
        lse = prefix_lse;
        copy_scaled(prefix, share(lse), result);
      } else if (is_empty(prefix_lse)) {
        lse = suffix_lse;
        copy_scaled(suffix, share(lse), result);
      } else {
        const double max = std::fmax(prefix_lse, suffix_lse);
        const double prefix_weight = std::exp(prefix_lse - max);
        const double suffix_weight = std::exp(suffix_lse - max);
        const double sum = prefix_weight + suffix_weight;
        lse = max + std::log(sum);
        const double factor = share(lse) / sum;
        for (std::int64_t d = 0; d < width; ++d) {
          set(result, d,
              (prefix_weight * get(prefix, d) + suffix_weight * get(suffix, d)) * factor);
        }
      }
      if (p.result.lse) *p.result.lse.ptr<float>({n, t}) = static_cast<float>(lse);
    }
  }
}

void quantize_query(const OpContext&, const QuantizeQueryParams& p) {
  const std::int64_t latent = p.q_latent.shape[2];
  for (std::int64_t t = 0; t < p.out.shape[0]; ++t) {
    for (std::int64_t n = 0; n < p.out.shape[1]; ++n) {
      for (std::int64_t i = 0; i < p.out.shape[2]; ++i) {
        const Row part = row_of(i < latent ? p.q_latent : p.q_pe, t, n);
        const auto value = static_cast<float>(get(part, i < latent ? i : i - latent));
        *p.out.ptr<Float8E4M3FN>({t, n, i}) = narrow_saturated<Float8E4M3FN>(value / p.scale);
      }
    }
  }
}

void quantize_output(const OpContext&, const QuantizeOutputParams& p) {
  const OutputRows rows(p);
  for (std::int64_t t = 0; t < p.output.out.shape[0]; ++t) {
    if (t >= p.x.shape[0]) {
      rows.clear(t);
      continue;
    }
    for (std::int64_t g = 0; g < rows.num_groups(); ++g) {
      std::array<float, OutputRows::kMaxGroup> values;
      const std::int64_t begin = rows.group_begin(g), count = rows.group_size(g);
      const Row group = part_of(row_of(p.x, t), begin, begin + count);
      copy(group, Row{values.data(), DType::f32, 1, count});
      rows.write_group(t, g, std::span(values).first(static_cast<std::size_t>(count)));
    }
  }
  rows.clear_padding();
}

}  // namespace fovea::reference
