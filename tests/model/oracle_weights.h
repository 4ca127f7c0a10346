// A model's layer in the oracle's terms.
#pragma once

#include <cmath>
#include <vector>

#include "fovea/model.h"
#include "fovea/oracle.h"
#include "layers/fp8_projection.h"
#include "support/poison.h"

namespace fovea::test {

/// Frequencies by the formulas of each scaling, from the oracle alone. LongRoPE: the short factors,
/// as for sequences within the original length; dynamic NTK: of the table's length.
inline oracle::Rotary oracle_rotary(const RopeConfig& rope) {
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
  if (const auto* longrope = std::get_if<LongRopeScaling>(&rope.scaling)) {
    return oracle::rotary_long(rope.dim, rope.theta, interleaved, longrope->short_factor,
                               static_cast<double>(longrope->max_position),
                               static_cast<double>(longrope->original_max_position));
  }
  if (const auto* linear = std::get_if<LinearScaling>(&rope.scaling)) {
    return oracle::rotary_linear(rope.dim, rope.theta, interleaved, linear->factor);
  }
  if (const auto* dynamic = std::get_if<DynamicNtkScaling>(&rope.scaling)) {
    return oracle::rotary_dynamic_ntk(rope.dim, rope.theta, interleaved, dynamic->factor,
                                      static_cast<double>(rope.max_position),
                                      static_cast<double>(dynamic->original_max_position));
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

inline std::vector<double> optional_values(const TensorView& view) {
  return view ? to_doubles(view) : std::vector<double>{};
}

/// A projection, decoded in float64 where it is FP8.
inline std::vector<double> projection_values(const TensorView& weight, const WeightScale& scale) {
  if (!scale.scale) return optional_values(weight);
  return fp8_values({weight, scale.scale, scale.groups});
}

inline oracle::MlaWeights oracle_weights(const ModelConfig& config, const MlaWeights& w) {
  const MlaDims& d = config.mla;
  constexpr auto values = optional_values;
  return {.hidden_size = d.hidden_size,
          .num_heads = d.num_heads,
          .q_lora_rank = d.q_lora_rank,
          .kv_lora_rank = d.kv_lora_rank,
          .qk_nope_head_dim = d.qk_nope_head_dim,
          .qk_rope_head_dim = d.qk_rope_head_dim,
          .v_head_dim = d.v_head_dim,
          .sm_scale = d.sm_scale,
          .rms_norm_eps = config.latent_norm_eps,
          .q_a_proj = projection_values(w.q_a_proj, w.q_a_proj_scale),
          .q_a_bias = values(w.q_a_bias),
          .q_a_layernorm = values(w.q_a_layernorm),
          .q_b_proj = projection_values(w.q_b_proj, w.q_b_proj_scale),
          .kv_a_proj = projection_values(w.kv_a_proj, w.kv_a_proj_scale),
          .kv_a_bias = values(w.kv_a_bias),
          .kv_a_layernorm = values(w.kv_a_layernorm),
          .kv_b_proj = projection_values(w.kv_b_proj, w.kv_b_proj_scale),
          .o_proj = projection_values(w.o_proj, w.o_proj_scale),
          .o_bias = values(w.o_bias),
          .rotary = oracle_rotary(config.groups[0].rope)};
}

/// Of a layer in `group`.
inline oracle::GqaWeights oracle_weights(const ModelConfig& config, const AttentionWeights& w,
                                         const KvGroupConfig& group) {
  const GqaDims& d = config.gqa;
  constexpr auto values = optional_values;
  return {.hidden_size = d.hidden_size,
          .num_heads = d.num_heads,
          .num_kv_heads = d.num_kv_heads,
          .head_dim = d.head_dim,
          .v_head_dim = d.v_head_dim,
          .sm_scale = d.sm_scale,
          .q_proj = projection_values(w.q_proj, w.q_proj_scale),
          .q_bias = values(w.q_bias),
          .k_proj = projection_values(w.k_proj, w.k_proj_scale),
          .k_bias = values(w.k_bias),
          .v_proj = projection_values(w.v_proj, w.v_proj_scale),
          .v_bias = values(w.v_bias),
          .q_norm = values(w.q_norm),
          .k_norm = values(w.k_norm),
          .norm_after_rope = config.qk_norm == QkNorm::post_rope,
          .rms_norm_eps = config.rms_norm_eps,
          .o_proj = projection_values(w.o_proj, w.o_proj_scale),
          .o_bias = values(w.o_bias),
          .sinks = values(w.sinks),
          .rotary = oracle_rotary(group.rope),
          .window_left = group.variant.window_left,
          .attention_chunk = group.variant.attention_chunk,
          .soft_cap = group.variant.soft_cap};
}

}  // namespace fovea::test
