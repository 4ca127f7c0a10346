#include "model/seeded_weights.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/float_bits.h"

namespace fovea {

namespace {

constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio

constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

enum class Domain : std::uint64_t { tensor = 1, token = 2 };
enum class TensorId : std::uint64_t {
  input_layernorm,
  q_a_proj,
  q_a_layernorm,
  q_b_proj,
  kv_a_proj,
  kv_a_layernorm,
  kv_b_proj,
  o_proj,
  q_a_bias,
  kv_a_bias,
  o_bias,
};

std::uint64_t stream_key(Domain domain, std::uint64_t seed, std::uint64_t major,
                         std::uint64_t minor) {
  std::uint64_t key = 0;
  for (const std::uint64_t word : {static_cast<std::uint64_t>(domain), seed, major, minor}) {
    key = mix((key ^ word) + kStep);
  }
  return key;
}

/// Element `index` of a stream before its scale.
float centred_sum(std::uint64_t key, std::uint64_t index) {
  const std::uint64_t h = mix(key + (index + 1) * kStep);
  constexpr std::int32_t kMean = 2 * 65535;
  const std::uint64_t sum = (h & 0xffff) + ((h >> 16) & 0xffff) + ((h >> 32) & 0xffff) + (h >> 48);
  return static_cast<float>(static_cast<std::int32_t>(sum) - kMean);
}

/// What brings centred_sum to the standard deviation `std`.
float scale_of(double std) {
  return static_cast<float>(std / std::sqrt((65536.0 * 65536.0 - 1) / 3));
}

// Of norm weights, around 1: smallest about 0.13, as a sum ends at 3.5 standard deviations.
constexpr float kNormSpread = 0.25f;
// Trained latents have a few channels several times larger than the rest; 1 of 64 here.
constexpr std::int64_t kOutlierPeriod = 64;
constexpr std::int64_t kOutlierOffset = 37;
constexpr float kOutlierGain = 6.f;
// Heads by index modulo 8. In bf16 a logit is off by a third of a percent of its head's standard
// deviation, so a row's error grows with these: 4.0 and 3.0 keep the mean over heads above 3 for
// every preset and the worst of thousands of rows below 1.2e-2 (with 4.5, 1.05e-2 was seen in 83).
constexpr std::int64_t kHeadPeriod = 8;
constexpr std::int64_t kPeakedHead = 3;
constexpr std::int64_t kLocalHead = 5;
constexpr double kPeakedStd = 4.0;
constexpr double kPlainStd = 3.0;
// A local head's logit of a token with itself: about a third of the weight among a thousand keys,
// so that a lost last token shows.
constexpr double kLocalLogit = 10.0;
// Output of about 0.25 per channel: context shows in the next layer without drowning the token.
constexpr double kOutputStd = 0.5;
constexpr double kBiasStd = 0.5;

/// Makes float32 rows and stores them in the layer's dtype.
class LayerMaker {
 public:
  LayerMaker(const ModelConfig& config, std::uint64_t seed, std::int64_t layer, DType dtype,
             ThreadPool& pool)
      : dims_(config.mla), seed_(seed), layer_(layer), dtype_(dtype), pool_(pool) {}

  LayerMemory make(bool attention_bias);

 private:
  std::uint64_t key(TensorId id) const {
    return stream_key(Domain::tensor, seed_, static_cast<std::uint64_t>(layer_),
                      static_cast<std::uint64_t>(id));
  }

  /// `row(r, out)` fills out [columns]; a one-dimensional tensor is a single row.
  template <class Row>
  TensorView fill(std::initializer_list<std::int64_t> shape, Row&& row) {
    Tensor tensor = Tensor::empty(dtype_, shape);
    const std::int64_t rows = shape.size() == 1 ? 1 : *shape.begin();
    const std::int64_t columns = *(shape.end() - 1);
    const std::int64_t tasks = std::min<std::int64_t>(pool_.num_threads(), rows);
    pool_.run(tasks, [&](std::int64_t task) {
      std::vector<float> values(static_cast<std::size_t>(columns));
      for (std::int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) {
        row(r, values.data());
        store(values.data(), columns, tensor.view(), r * columns);
      }
    });
    const TensorView view = tensor.view();
    result_.memory.push_back(std::move(tensor));
    return view;
  }

  TensorView random(TensorId id, std::initializer_list<std::int64_t> shape, double std) {
    const std::int64_t columns = *(shape.end() - 1);
    return fill(shape, [=, k = key(id), scale = scale_of(std)](std::int64_t r, float* out) {
      random_row(k, r, columns, scale, out);
    });
  }

  static void random_row(std::uint64_t key, std::int64_t row, std::int64_t columns, float scale,
                         float* out) {
    const auto first = static_cast<std::uint64_t>(row * columns);
    for (std::int64_t c = 0; c < columns; ++c) {
      out[c] = centred_sum(key, first + static_cast<std::uint64_t>(c)) * scale;
    }
  }

  TensorView norm_weight(TensorId id, std::int64_t size, std::int64_t outlier_period);
  TensorView query_weight(std::int64_t in_features, double input_variance);
  static void store(const float* values, std::int64_t count, const TensorView& dst,
                    std::int64_t offset);

  const MlaDims& dims_;
  std::uint64_t seed_;
  std::int64_t layer_;
  DType dtype_;
  ThreadPool& pool_;
  LayerMemory result_;
};

void LayerMaker::store(const float* values, std::int64_t count, const TensorView& dst,
                       std::int64_t offset) {
  const TensorView src = TensorView::of(values, {count});
  TensorView row = TensorView::contiguous(dst.data, dst.dtype, {dst.numel()});
  copy(src, row.slice(0, offset, offset + count));
}

/// Outliers at kOutlierOffset of every `outlier_period` channels; 0: none.
TensorView LayerMaker::norm_weight(TensorId id, std::int64_t size, std::int64_t outlier_period) {
  return fill({size}, [=, k = key(id), unit = scale_of(1)](std::int64_t, float* out) {
    for (std::int64_t c = 0; c < size; ++c) {
      out[c] = 1.f + centred_sum(k, static_cast<std::uint64_t>(c)) * unit * kNormSpread;
      if (outlier_period > 0 && c % outlier_period == kOutlierOffset) out[c] *= kOutlierGain;
    }
  });
}

/// q_b_proj, or q_proj without compression. Keys have unit variance, so a head's logits have the
/// standard deviation of its queries' entries, times sm_scale sqrt(P + R).
TensorView LayerMaker::query_weight(std::int64_t in_features, double input_variance) {
  const std::int64_t head_dim = dims_.qk_head_dim();
  const std::int64_t rope_dim = dims_.qk_rope_head_dim;
  const double sm_scale = dims_.sm_scale;
  const double unit = 1 / (sm_scale * std::sqrt(static_cast<double>(head_dim))) /
                      std::sqrt(static_cast<double>(in_features) * input_variance);
  const float plain = scale_of(kPlainStd * unit);
  const float peaked = scale_of(kPeakedStd * unit);
  // A local head's query repeats the key's own rope channels, scaled to |k_pe|^2 = R.
  const auto local = static_cast<float>(kLocalLogit / (sm_scale * static_cast<double>(rope_dim)));
  const std::int64_t shared = dims_.q_lora_rank > 0 ? std::min(rope_dim, dims_.q_lora_rank) : 0;
  const float key_scale =
      scale_of(1 / std::sqrt(static_cast<double>(in_features) * input_variance));
  const std::uint64_t query_key = key(TensorId::q_b_proj);
  const std::uint64_t kv_key = key(TensorId::kv_a_proj);

  return fill({dims_.num_heads * head_dim, in_features}, [&](std::int64_t r, float* out) {
    const std::int64_t head = r / head_dim % kHeadPeriod;
    const std::int64_t rope_channel = r % head_dim - dims_.qk_nope_head_dim;
    random_row(query_key, r, in_features, head == kPeakedHead ? peaked : plain, out);
    if (head != kLocalHead || rope_channel < 0) return;
    if (dims_.q_lora_rank > 0) {
      if (rope_channel < shared) out[rope_channel] += local;
      return;
    }
    std::vector<float> key_row(static_cast<std::size_t>(in_features));
    random_row(kv_key, dims_.kv_lora_rank + rope_channel, in_features, key_scale, key_row.data());
    for (std::int64_t c = 0; c < in_features; ++c) {
      out[c] += key_row[static_cast<std::size_t>(c)] * local;
    }
  });
}

LayerMemory LayerMaker::make(bool attention_bias) {
  const MlaDims& d = dims_;
  const std::int64_t H = d.hidden_size, N = d.num_heads, Lq = d.q_lora_rank, L = d.kv_lora_rank;
  const std::int64_t R = d.qk_rope_head_dim, V = d.v_head_dim;
  auto inv_sqrt = [](double x) { return 1 / std::sqrt(x); };

  // Variance of a normed activation, whose weights spread around 1, and of one with outliers.
  const double spread = 1 + double{kNormSpread} * double{kNormSpread};
  const std::int64_t outliers = (L - kOutlierOffset + kOutlierPeriod - 1) / kOutlierPeriod;
  const double latent =
      spread * (1 + static_cast<double>(outliers) *
                        (double{kOutlierGain} * double{kOutlierGain} - 1) / static_cast<double>(L));
  const double from_hidden = inv_sqrt(static_cast<double>(H) * spread);

  LayerTensors& t = result_.tensors;
  MlaWeights& w = t.mla;
  t.input_layernorm = norm_weight(TensorId::input_layernorm, H, 0);
  w.kv_a_proj = random(TensorId::kv_a_proj, {L + R, H}, from_hidden);
  if (Lq > 0) {
    // Its first rows are those of k_pe, from which local heads build their queries.
    const std::int64_t shared = std::min(R, Lq);
    const std::uint64_t query_key = key(TensorId::q_a_proj), kv_key = key(TensorId::kv_a_proj);
    w.q_a_proj = fill({Lq, H}, [&](std::int64_t r, float* out) {
      const bool of_key = r < shared;
      random_row(of_key ? kv_key : query_key, of_key ? L + r : r, H, scale_of(from_hidden), out);
    });
    w.q_a_layernorm = norm_weight(TensorId::q_a_layernorm, Lq, 0);
  }
  w.q_b_proj = query_weight(Lq > 0 ? Lq : H, spread);
  w.kv_a_layernorm = norm_weight(TensorId::kv_a_layernorm, L, kOutlierPeriod);
  w.kv_b_proj = random(TensorId::kv_b_proj, {N * (d.qk_nope_head_dim + V), L},
                       inv_sqrt(static_cast<double>(L) * latent));
  w.o_proj =
      random(TensorId::o_proj, {H, N * V}, kOutputStd * inv_sqrt(static_cast<double>(N * V)));
  if (attention_bias) {
    if (Lq > 0) w.q_a_bias = random(TensorId::q_a_bias, {Lq}, kBiasStd);
    w.kv_a_bias = random(TensorId::kv_a_bias, {L + R}, kBiasStd);
    w.o_bias = random(TensorId::o_bias, {H}, kBiasStd);
  }
  return std::move(result_);
}

template <class T>
void fill_hidden_state(std::uint64_t key, const TensorView& out) {
  const float unit = scale_of(1);
  for (std::int64_t c = 0; c < out.shape[0]; ++c) {
    *out.ptr<T>({c}) = narrow<T>(centred_sum(key, static_cast<std::uint64_t>(c)) * unit);
  }
}

}  // namespace

LayerMemory seeded_layer(const ModelConfig& config, std::uint64_t seed, std::int64_t layer,
                         DType dtype, ThreadPool& pool) {
  return LayerMaker(config, seed, layer, dtype, pool).make(config.attention_bias);
}

void token_hidden_state(std::uint64_t seed, std::int64_t token_id, const TensorView& out) {
  FOVEA_CHECK(out && out.ndim == 1, invalid_argument, "out is {}, but must be [hidden_size]",
              to_string(out));
  const std::uint64_t key =
      stream_key(Domain::token, seed, static_cast<std::uint64_t>(token_id), 0);
  switch (out.dtype) {
    case DType::f32:
      return fill_hidden_state<float>(key, out);
    case DType::f16:
      return fill_hidden_state<Float16>(key, out);
    case DType::bf16:
      return fill_hidden_state<BFloat16>(key, out);
    default:
      fail(ErrorCode::invalid_argument, "out is {}, but must be f32, f16 or bf16", to_string(out));
  }
}

}  // namespace fovea
