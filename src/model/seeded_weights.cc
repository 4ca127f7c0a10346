#include "model/seeded_weights.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/float_bits.h"
#include "model/seeded_tensors.h"

namespace fovea {

namespace {

// Trained latents have a few channels several times larger than the rest; 1 of 64 here.
constexpr std::int64_t kOutlierPeriod = 64;
constexpr std::int64_t kOutlierOffset = 37;
constexpr float kOutlierGain = 6.f;

/// The weights of a layer with latent attention.
class MlaMaker {
 public:
  MlaMaker(const MlaDims& dims, SeededTensors& tensors) : dims_(dims), tensors_(tensors) {}

  MlaWeights make(bool attention_bias) const;

 private:
  std::uint64_t key(TensorId id) const { return tensors_.key(id); }
  TensorView latent_norm(std::int64_t size) const;
  TensorView query_weight(std::int64_t in_features, double input_variance) const;

  const MlaDims& dims_;
  SeededTensors& tensors_;
};

/// Outliers at kOutlierOffset of every kOutlierPeriod channels.
TensorView MlaMaker::latent_norm(std::int64_t size) const {
  return tensors_.fill({size}, [=, k = key(TensorId::kv_a_layernorm)](std::int64_t, float* out) {
    norm_row(k, size, 1.f, out);
    for (std::int64_t c = kOutlierOffset; c < size; c += kOutlierPeriod) out[c] *= kOutlierGain;
  });
}

/// q_b_proj, or q_proj without compression. Keys have unit variance, so a head's logits have the
/// standard deviation of its queries' entries, times sm_scale sqrt(P + R).
TensorView MlaMaker::query_weight(std::int64_t in_features, double input_variance) const {
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

  return tensors_.fill({dims_.num_heads * head_dim, in_features}, [&](std::int64_t r, float* out) {
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

MlaWeights MlaMaker::make(bool attention_bias) const {
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

  MlaWeights w;
  w.kv_a_proj = tensors_.random(TensorId::kv_a_proj, {L + R, H}, from_hidden);
  if (Lq > 0) {
    // Its first rows are those of k_pe, from which local heads build their queries.
    const std::int64_t shared = std::min(R, Lq);
    const std::uint64_t query_key = key(TensorId::q_a_proj), kv_key = key(TensorId::kv_a_proj);
    w.q_a_proj = tensors_.fill({Lq, H}, [&](std::int64_t r, float* out) {
      const bool of_key = r < shared;
      random_row(of_key ? kv_key : query_key, of_key ? L + r : r, H, scale_of(from_hidden), out);
    });
    w.q_a_layernorm = tensors_.norm_weight(TensorId::q_a_layernorm, Lq);
  }
  w.q_b_proj = query_weight(Lq > 0 ? Lq : H, spread);
  w.kv_a_layernorm = latent_norm(L);
  w.kv_b_proj = tensors_.random(TensorId::kv_b_proj, {N * (d.qk_nope_head_dim + V), L},
                                inv_sqrt(static_cast<double>(L) * latent));
  w.o_proj = tensors_.random(TensorId::o_proj, {H, N * V},
                             kOutputStd * inv_sqrt(static_cast<double>(N * V)));
  if (attention_bias) {
    if (Lq > 0) w.q_a_bias = tensors_.random(TensorId::q_a_bias, {Lq}, kBiasStd);
    w.kv_a_bias = tensors_.random(TensorId::kv_a_bias, {L + R}, kBiasStd);
    w.o_bias = tensors_.random(TensorId::o_bias, {H}, kBiasStd);
  }
  return w;
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
  SeededTensors tensors(seed, layer, dtype, pool);
  LayerMemory result;
  LayerTensors& t = result.tensors;
  t.input_layernorm = tensors.norm_weight(TensorId::input_layernorm, config.hidden_size);
  if (config.post_attention_norm) {
    t.post_attention_layernorm =
        tensors.norm_weight(TensorId::post_attention_layernorm, config.hidden_size);
  }
  if (config.is_mla()) {
    t.mla = MlaMaker(config.mla, tensors).make(config.attention_bias);
  } else {
    t.gqa = seeded_gqa(config, layer, tensors);
  }
  result.memory = std::move(tensors).take_memory();
  return result;
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
