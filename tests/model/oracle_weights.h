// A model's layer in the oracle's terms.
#pragma once

#include <cmath>
#include <vector>

#include "fovea/model.h"
#include "fovea/oracle.h"
#include "support/poison.h"

namespace fovea::test {

/// Frequencies by the formulas of each scaling, from the oracle alone. LongRoPE: the short factors,
/// as for sequences within the original length.
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
         .mscale_all_dim = yarn->mscale_all_dim});
  }
  oracle::Rotary rotary = oracle::rotary(rope.dim, rope.theta, interleaved);
  if (const auto* longrope = std::get_if<LongRopeScaling>(&rope.scaling)) {
    for (std::size_t i = 0; i < rotary.inv_freq.size(); ++i) {
      rotary.inv_freq[i] /= longrope->short_factor[i];
    }
    const auto original = static_cast<double>(longrope->original_max_position);
    const double ratio = static_cast<double>(longrope->max_position) / original;
    if (ratio > 1) rotary.amplitude = std::sqrt(1 + std::log(ratio) / std::log(original));
  }
  return rotary;
}

inline oracle::MlaWeights oracle_weights(const ModelConfig& config, const MlaWeights& w) {
  const MlaDims& d = config.mla;
  auto values = [](const TensorView& view) {
    return view ? to_doubles(view) : std::vector<double>{};
  };
  return {.hidden_size = d.hidden_size,
          .num_heads = d.num_heads,
          .q_lora_rank = d.q_lora_rank,
          .kv_lora_rank = d.kv_lora_rank,
          .qk_nope_head_dim = d.qk_nope_head_dim,
          .qk_rope_head_dim = d.qk_rope_head_dim,
          .v_head_dim = d.v_head_dim,
          .sm_scale = d.sm_scale,
          .rms_norm_eps = config.latent_norm_eps,
          .q_a_proj = values(w.q_a_proj),
          .q_a_bias = values(w.q_a_bias),
          .q_a_layernorm = values(w.q_a_layernorm),
          .q_b_proj = values(w.q_b_proj),
          .kv_a_proj = values(w.kv_a_proj),
          .kv_a_bias = values(w.kv_a_bias),
          .kv_a_layernorm = values(w.kv_a_layernorm),
          .kv_b_proj = values(w.kv_b_proj),
          .o_proj = values(w.o_proj),
          .o_bias = values(w.o_bias),
          .rotary = oracle_rotary(config.groups[0].rope)};
}

}  // namespace fovea::test
