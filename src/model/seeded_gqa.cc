#include <algorithm>
#include <cmath>
#include <vector>

#include "model/seeded_tensors.h"

namespace fovea {

namespace {

/// Factor of a rotation on queries and on keys.
double amplitude_of(const RopeConfig& rope) {
  const auto* yarn = std::get_if<YarnScaling>(&rope.scaling);
  if (yarn == nullptr) return 1;
  if (yarn->attention_factor) return *yarn->attention_factor;
  return yarn_mscale(yarn->factor, yarn->mscale) / yarn_mscale(yarn->factor, yarn->mscale_all_dim);
}

/// Standard deviation of query entries that gives unit-variance keys logits of deviation 1.
double unit_query(const ModelConfig& config, std::int64_t layer) {
  const std::int32_t group = config.layer_group[static_cast<std::size_t>(layer)];
  const double amplitude = amplitude_of(config.groups[static_cast<std::size_t>(group)].rope);
  const GqaDims& d = config.gqa;
  return 1 /
         (double{d.sm_scale} * std::sqrt(static_cast<double>(d.head_dim)) * amplitude * amplitude);
}

/// How much of its own key a local head's query holds beside a plain query of the same length: its
/// logit with itself is then kLocalLogit above the others.
double local_share(const GqaDims& dims, bool normed) {
  const double std = normed ? kNormedStd : kPlainStd;
  const double share = kLocalLogit / (std * std::sqrt(static_cast<double>(dims.head_dim)));
  if (!normed) return share;
  // A norm takes the length away that the key adds; no share makes up for it in narrow heads.
  constexpr double kMost = 0.8;
  const double cosine = std::min(share, kMost);
  return cosine / std::sqrt(1 - cosine * cosine);
}

/// q_proj: rows of k_proj in local heads, so that a token finds itself and its like.
TensorView query_weight(const ModelConfig& config, double unit, SeededTensors& tensors) {
  const GqaDims& d = config.gqa;
  const std::int64_t H = d.hidden_size, D = d.head_dim;
  const std::int64_t heads_per_kv = d.num_heads / d.num_kv_heads;
  const bool normed = config.qk_norm != QkNorm::none;
  const double from_hidden = 1 / std::sqrt(static_cast<double>(H) * kNormedVariance);
  // With a norm its weights hold the logits' deviation, for all heads alike.
  const double plain_std = normed ? 1 : kPlainStd * unit;
  const float plain = scale_of(plain_std * from_hidden);
  const float peaked = normed ? plain : scale_of(kPeakedStd * unit * from_hidden);
  const float key_scale = scale_of(from_hidden);
  const auto local = static_cast<float>(local_share(d, normed) * plain_std);
  const std::uint64_t query_key = tensors.key(TensorId::q_proj);
  const std::uint64_t kv_key = tensors.key(TensorId::k_proj);
  return tensors.fill({d.q_size(), H}, [&](std::int64_t r, float* out) {
    const std::int64_t head = r / D;
    const std::int64_t kind = head % kHeadPeriod;
    random_row(query_key, r, H, kind == kPeakedHead ? peaked : plain, out);
    if (kind != kLocalHead) return;
    std::vector<float> key_row(static_cast<std::size_t>(H));
    random_row(kv_key, head / heads_per_kv * D + r % D, H, key_scale, key_row.data());
    for (std::int64_t c = 0; c < H; ++c) out[c] += key_row[static_cast<std::size_t>(c)] * local;
  });
}

}  // namespace

AttentionWeights seeded_gqa(const ModelConfig& config, std::int64_t layer, SeededTensors& tensors) {
  const GqaDims& d = config.gqa;
  const std::int64_t H = d.hidden_size;
  const double from_hidden = 1 / std::sqrt(static_cast<double>(H) * kNormedVariance);
  const double unit = unit_query(config, layer);

  AttentionWeights w;
  w.q_proj = query_weight(config, unit, tensors);
  w.k_proj = tensors.random(TensorId::k_proj, {d.k_size(), H}, from_hidden);
  w.v_proj = tensors.random(TensorId::v_proj, {d.v_size(), H}, from_hidden);
  w.o_proj = tensors.random(TensorId::o_proj, {H, d.out_size()},
                            kOutputStd * (1 / std::sqrt(static_cast<double>(d.out_size()))));
  if (config.attention_bias) {
    w.q_bias = tensors.random(TensorId::q_bias, {d.q_size()}, kBiasStd);
    w.k_bias = tensors.random(TensorId::k_bias, {d.k_size()}, kBiasStd);
    w.v_bias = tensors.random(TensorId::v_bias, {d.v_size()}, kBiasStd);
  }
  if (config.o_bias) w.o_bias = tensors.random(TensorId::o_bias, {H}, kBiasStd);
  if (config.qk_norm != QkNorm::none) {
    w.q_norm =
        tensors.norm_weight(TensorId::q_norm, d.head_dim, static_cast<float>(kNormedStd * unit));
    w.k_norm = tensors.norm_weight(TensorId::k_norm, d.head_dim);
  }
  if (config.sinks) w.sinks = tensors.random(TensorId::sinks, {d.num_heads}, 1.0);
  return w;
}

}  // namespace fovea
