#include "engine/oracle_weights.h"

#include <cmath>
#include <limits>
#include <variant>

#include "core/check.h"

namespace fovea::engine {
namespace {

oracle::Format oracle_format(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return oracle::Format::f32;
    case DType::f16:
      return oracle::Format::f16;
    case DType::bf16:
      return oracle::Format::bf16;
    default:
      fail(ErrorCode::unsupported, "the oracle decodes f32, f16 and bf16, not {}", name_of(dtype));
  }
}

oracle::Rotary long_rotary(const RopeConfig& rope, const LongRopeScaling& scaling) {
  oracle::Rotary rotary =
      oracle::rotary(rope.dim, rope.theta, rope.pairing == RopePairing::interleaved);
  const auto original = static_cast<double>(scaling.original_max_position);
  const std::vector<double>& divisors = rope.max_position <= scaling.original_max_position
                                            ? scaling.short_factor
                                            : scaling.long_factor;
  for (std::size_t i = 0; i < divisors.size(); ++i) rotary.inv_freq[i] /= divisors[i];
  const auto trained =
      static_cast<double>(scaling.max_position > 0 ? scaling.max_position : rope.max_position);
  if (trained > original) {
    rotary.amplitude = std::sqrt(1 + std::log(trained / original) / std::log(original));
  }
  return rotary;
}

oracle::Rotary oracle_rotary(const RopeConfig& rope) {
  const bool interleaved = rope.pairing == RopePairing::interleaved;
  if (const auto* yarn = std::get_if<YarnScaling>(&rope.scaling)) {
    return oracle::rotary_yarn(
        rope.dim, rope.theta, interleaved,
        {.factor = yarn->factor,
         .original_max_position = static_cast<double>(yarn->original_max_position),
         .beta_fast = yarn->beta_fast,
         .beta_slow = yarn->beta_slow,
         .mscale = yarn->mscale,
         .mscale_all_dim = yarn->mscale_all_dim});
  }
  if (const auto* scaling = std::get_if<LongRopeScaling>(&rope.scaling)) {
    return long_rotary(rope, *scaling);
  }
  return oracle::rotary(rope.dim, rope.theta, interleaved);
}

double oracle_sm_scale(const MlaDims& dims, const RopeConfig& rope) {
  const auto* yarn = std::get_if<YarnScaling>(&rope.scaling);
  const double mscale = yarn ? oracle::yarn_mscale(yarn->factor, yarn->mscale_all_dim) : 1;
  return mscale * mscale / std::sqrt(static_cast<double>(dims.qk_head_dim()));
}

}  // namespace

std::vector<double> to_doubles(const TensorView& view) {
  if (!view) return {};
  FOVEA_CHECK(view.ndim >= 1 && view.ndim <= 2 &&
                  view.strides[static_cast<std::size_t>(view.ndim) - 1] == 1,
              unsupported, "{} must have rank 1 or 2 and unit innermost stride", to_string(view));
  const oracle::Format format = oracle_format(view.dtype);
  if (view.is_contiguous()) return oracle::decode(view.data, view.numel(), format);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(view.numel()));
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    const TensorView row = view.select(0, i);
    const std::vector<double> decoded = oracle::decode(row.data, row.numel(), format);
    values.insert(values.end(), decoded.begin(), decoded.end());
  }
  return values;
}

double relative_error(std::span<const double> expected, std::span<const double> got) {
  double norm = 0, error = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    norm += expected[i] * expected[i];
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
  }
  if (error == 0) return 0;
  const double relative = std::sqrt(error / norm);
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

oracle::MlaWeights oracle_weights(const Model& model, std::int64_t layer) {
  const MlaWeights& source = model.mla_weights(layer);
  const MlaDims& dims = std::get<MlaLayer>(model.layer(layer).attention).dims();
  FOVEA_CHECK(source.kv_b_order == KvBOrder::per_head, unsupported,
              "verification reads kv_b_proj head by head");
  oracle::MlaWeights weights;
  weights.hidden_size = dims.hidden_size;
  weights.num_heads = dims.num_heads;
  weights.q_lora_rank = dims.q_lora_rank;
  weights.kv_lora_rank = dims.kv_lora_rank;
  weights.qk_nope_head_dim = dims.qk_nope_head_dim;
  weights.qk_rope_head_dim = dims.qk_rope_head_dim;
  weights.v_head_dim = dims.v_head_dim;
  weights.sm_scale = oracle_sm_scale(dims, model.config().groups[0].rope);
  weights.rms_norm_eps = model.config().latent_norm_eps;
  weights.q_a_proj = to_doubles(source.q_a_proj);
  weights.q_a_bias = to_doubles(source.q_a_bias);
  weights.q_a_layernorm = to_doubles(source.q_a_layernorm);
  weights.q_b_proj = to_doubles(source.q_b_proj);
  weights.kv_a_proj = to_doubles(source.kv_a_proj);
  weights.kv_a_bias = to_doubles(source.kv_a_bias);
  weights.kv_a_layernorm = to_doubles(source.kv_a_layernorm);
  weights.kv_b_proj = to_doubles(source.kv_b_proj);
  weights.o_proj = to_doubles(source.o_proj);
  weights.o_bias = to_doubles(source.o_bias);
  weights.rotary = oracle_rotary(model.config().groups[0].rope);
  return weights;
}

}  // namespace fovea::engine
