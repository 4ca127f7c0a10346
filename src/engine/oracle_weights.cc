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
    case DType::f8e4m3fn:
      return oracle::Format::f8e4m3fn;
    case DType::f8e5m2:
      return oracle::Format::f8e5m2;
    case DType::i8:
      return oracle::Format::i8;
    case DType::i4:
      return oracle::Format::i4;
    default:
      fail(ErrorCode::unsupported, "the oracle decodes no {}", name_of(dtype));
  }
}

oracle::RowScales oracle_scales(KvScales scales) {
  switch (scales) {
    case KvScales::none:
      break;
    case KvScales::per_tensor:
      return oracle::RowScales::per_tensor;
    case KvScales::per_token:
      return oracle::RowScales::per_token;
    case KvScales::ds_mla:
      return oracle::RowScales::ds_mla;
  }
  return oracle::RowScales::none;
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
  if (rope.dim == 0) return {};
  const bool interleaved = rope.pairing == RopePairing::interleaved;
  if (const auto* yarn = std::get_if<YarnScaling>(&rope.scaling)) {
    return oracle::rotary_yarn(
        rope.dim, rope.theta, interleaved,
        {.factor = yarn->factor,
         .original_max_position = static_cast<double>(yarn->original_max_position),
         .beta_fast = yarn->beta_fast,
         .beta_slow = yarn->beta_slow,
         .mscale = yarn->mscale,
         .mscale_all_dim = yarn->mscale_all_dim,
         .attention_factor = yarn->attention_factor.value_or(0),
         .truncate = yarn->truncate});
  }
  if (const auto* scaling = std::get_if<LongRopeScaling>(&rope.scaling)) {
    return long_rotary(rope, *scaling);
  }
  if (const auto* linear = std::get_if<LinearScaling>(&rope.scaling)) {
    return oracle::rotary_linear(rope.dim, rope.theta, interleaved, linear->factor);
  }
  if (const auto* ntk = std::get_if<DynamicNtkScaling>(&rope.scaling)) {
    return oracle::rotary_dynamic_ntk(rope.dim, rope.theta, interleaved, ntk->factor,
                                      static_cast<double>(rope.max_position),
                                      static_cast<double>(ntk->original_max_position));
  }
  if (const auto* llama3 = std::get_if<Llama3Scaling>(&rope.scaling)) {
    return oracle::rotary_llama3(
        rope.dim, rope.theta, interleaved,
        {.factor = llama3->factor,
         .low_freq_factor = llama3->low_freq_factor,
         .high_freq_factor = llama3->high_freq_factor,
         .original_max_position = static_cast<double>(llama3->original_max_position)});
  }
  return oracle::rotary(rope.dim, rope.theta, interleaved);
}

double oracle_sm_scale(const MlaDims& dims, const RopeConfig& rope) {
  const auto* yarn = std::get_if<YarnScaling>(&rope.scaling);
  const double mscale = yarn ? oracle::yarn_mscale(yarn->factor, yarn->mscale_all_dim) : 1;
  return mscale * mscale / std::sqrt(static_cast<double>(dims.qk_head_dim()));
}

double oracle_sm_scale(const GqaDims& dims) {
  if (dims.sm_scale > 0) return dims.sm_scale;  // A field of the config, as Gemma has one.
  return 1 / (std::sqrt(static_cast<double>(dims.head_dim)) * dims.q_scaling);
}

const KvGroupConfig& group_config(const Model& model, std::int64_t layer) {
  return model.config().groups[static_cast<std::size_t>(model.layer(layer).kv_group)];
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

std::vector<double> to_doubles(const TensorView& projection, const WeightScale& scale) {
  std::vector<double> values = to_doubles(projection);
  if (!scale.scale) return values;
  const std::vector<double> scales = to_doubles(scale.scale);
  const std::int64_t rows = projection.shape[0], columns = projection.shape[1];
  const std::int64_t group_rows = scale.groups.out > 0 ? scale.groups.out : rows;
  const std::int64_t group_columns = scale.groups.in > 0 ? scale.groups.in : columns;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t group = i / group_rows * scale.scale.shape[1] + j / group_columns;
      values[static_cast<std::size_t>(i * columns + j)] *= scales[static_cast<std::size_t>(group)];
    }
  }
  return values;
}

oracle::RowFormat oracle_row_format(const KvFormat& format) {
  return {.format = oracle_format(format.dtype),
          .scales = oracle_scales(format.scales),
          .num_heads = format.num_heads,
          .first_group = format.first_group,
          .scale = static_cast<double>(format.scale)};
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

oracle::MlaWeights oracle_mla_weights(const Model& model, std::int64_t layer) {
  const MlaWeights& source = model.mla_weights(layer);
  const MlaDims& dims = std::get<MlaLayer>(model.layer(layer).attention).dims();
  const KvGroupConfig& group = group_config(model, layer);
  FOVEA_CHECK(source.kv_b_order == KvBOrder::per_head, unsupported,
              "verification reads kv_b_proj head by head");
  FOVEA_CHECK(!source.sinks && group.variant == AttentionVariant{}, unsupported,
              "verification of latent attention knows no sinks, windows, chunks or soft cap");
  oracle::MlaWeights weights;
  weights.hidden_size = dims.hidden_size;
  weights.num_heads = dims.num_heads;
  weights.q_lora_rank = dims.q_lora_rank;
  weights.kv_lora_rank = dims.kv_lora_rank;
  weights.qk_nope_head_dim = dims.qk_nope_head_dim;
  weights.qk_rope_head_dim = dims.qk_rope_head_dim;
  weights.v_head_dim = dims.v_head_dim;
  weights.sm_scale = oracle_sm_scale(dims, group.rope);
  weights.rms_norm_eps = model.config().latent_norm_eps;
  weights.q_a_proj = to_doubles(source.q_a_proj, source.q_a_proj_scale);
  weights.q_a_bias = to_doubles(source.q_a_bias);
  weights.q_a_layernorm = to_doubles(source.q_a_layernorm);
  weights.q_b_proj = to_doubles(source.q_b_proj, source.q_b_proj_scale);
  weights.kv_a_proj = to_doubles(source.kv_a_proj, source.kv_a_proj_scale);
  weights.kv_a_bias = to_doubles(source.kv_a_bias);
  weights.kv_a_layernorm = to_doubles(source.kv_a_layernorm);
  weights.kv_b_proj = to_doubles(source.kv_b_proj, source.kv_b_proj_scale);
  weights.o_proj = to_doubles(source.o_proj, source.o_proj_scale);
  weights.o_bias = to_doubles(source.o_bias);
  weights.rotary = oracle_rotary(group.rope);
  return weights;
}

oracle::GqaWeights oracle_gqa_weights(const Model& model, std::int64_t layer) {
  const AttentionWeights& source = model.gqa_weights(layer);
  const GqaDims& dims = model.config().gqa;
  const KvGroupConfig& group = group_config(model, layer);
  oracle::GqaWeights weights;
  weights.hidden_size = dims.hidden_size;
  weights.num_heads = dims.num_heads;
  weights.num_kv_heads = dims.num_kv_heads;
  weights.head_dim = dims.head_dim;
  weights.v_head_dim = dims.v_head_dim;
  weights.sm_scale = oracle_sm_scale(dims);
  weights.q_proj = to_doubles(source.q_proj, source.q_proj_scale);
  weights.q_bias = to_doubles(source.q_bias);
  weights.k_proj = to_doubles(source.k_proj, source.k_proj_scale);
  weights.k_bias = to_doubles(source.k_bias);
  weights.v_proj = to_doubles(source.v_proj, source.v_proj_scale);
  weights.v_bias = to_doubles(source.v_bias);
  weights.q_norm = to_doubles(source.q_norm);
  weights.k_norm = to_doubles(source.k_norm);
  weights.norm_after_rope = model.config().qk_norm == QkNorm::post_rope;
  weights.rms_norm_eps = model.config().rms_norm_eps;
  weights.o_proj = to_doubles(source.o_proj, source.o_proj_scale);
  weights.o_bias = to_doubles(source.o_bias);
  weights.sinks = to_doubles(source.sinks);
  weights.rotary = oracle_rotary(group.rope);
  weights.window_left = group.variant.window_left;
  weights.attention_chunk = group.variant.attention_chunk;
  weights.soft_cap = group.variant.soft_cap;
  return weights;
}

OracleLayer::OracleLayer(const Model& model, std::int64_t layer) {
  if (model.config().is_mla()) {
    weights_ = oracle_mla_weights(model, layer);
  } else {
    weights_ = oracle_gqa_weights(model, layer);
  }
}

std::vector<double> OracleLayer::stored_rows(std::span<const double> normed,
                                             std::span<const std::int64_t> positions) const {
  if (const auto* mla = std::get_if<oracle::MlaWeights>(&weights_)) {
    return oracle::mla_latent_rows(*mla, normed, positions);
  }
  return oracle::gqa_rows(std::get<oracle::GqaWeights>(weights_), normed, positions);
}

std::vector<double> OracleLayer::queries(std::span<const double> normed,
                                         std::span<const std::int64_t> positions) const {
  if (const auto* mla = std::get_if<oracle::MlaWeights>(&weights_)) {
    return oracle::mla_queries(*mla, normed, positions);
  }
  return oracle::gqa_queries(std::get<oracle::GqaWeights>(weights_), normed, positions);
}

std::vector<double> OracleLayer::attention(std::span<const double> query,
                                           std::span<const double> rows) const {
  if (const auto* mla = std::get_if<oracle::MlaWeights>(&weights_)) {
    return oracle::mla_attention(*mla, query, rows, true, oracle::MlaForm::absorbed);
  }
  return oracle::gqa_attention(std::get<oracle::GqaWeights>(weights_), query, rows);
}

std::vector<double> OracleLayer::o_proj(std::span<const double> attended) const {
  return std::visit(
      [&](const auto& weights) {
        return oracle::linear(attended, weights.o_proj, weights.o_bias,
                              weights.num_heads * weights.v_head_dim);
      },
      weights_);
}

}  // namespace fovea::engine
