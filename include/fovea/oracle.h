// Float64 attention and MLA straight from the formulas, for verification. Standard library only; it
// shares no code with the rest of fovea, so that a mistake there cannot cancel out here.
//
// All arrays are row-major std::span<const double>; sizes are checked and std::invalid_argument
// names the one that is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fovea::oracle {

/// Element types that the oracle decodes by itself.
enum class Format { f32, f16, bf16 };

/// `count` elements of `format` at `bytes`, exactly.
std::vector<double> decode(const void* bytes, std::int64_t count, Format format);

/// Dense attention of one sequence. Query i stands at position num_keys - num_queries + i.
struct Attention {
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
  std::int64_t num_heads = 0;     ///< Query heads.
  std::int64_t num_kv_heads = 0;  ///< Divides num_heads; query head h reads head h / (heads / kv).
  std::int64_t qk_dim = 0;
  std::int64_t v_dim = 0;
  double sm_scale = 0;
  bool causal = true;
  std::span<const double> q;  ///< [num_queries, num_heads, qk_dim]
  std::span<const double> k;  ///< [num_keys, num_kv_heads, qk_dim]
  std::span<const double> v;  ///< [num_keys, num_kv_heads, v_dim]
};

struct AttentionResult {
  std::vector<double> out;  ///< [num_queries, num_heads, v_dim]; 0 where no key is visible.
  std::vector<double> lse;  ///< [num_heads, num_queries], natural log; -inf where none is visible.
};
AttentionResult attention(const Attention& problem);

/// Merge of two partial results of the same queries by the definition of lse.
AttentionResult merge(const AttentionResult& a, const AttentionResult& b, std::int64_t num_heads,
                      std::int64_t num_queries, std::int64_t v_dim);

/// x / sqrt(mean(x^2) + eps) * weight, row by row. x [rows, weight.size()].
std::vector<double> rms_norm(std::span<const double> x, std::span<const double> weight, double eps);

/// y = x W^T + bias. x [rows, in], weight [out, in], bias [out] or empty.
std::vector<double> linear(std::span<const double> x, std::span<const double> weight,
                           std::span<const double> bias, std::int64_t in_features);

/// Angles of rotary embedding: frequency of channel pair i, and the amplitude of cos and sin.
struct Rotary {
  std::vector<double> inv_freq;  ///< [R / 2]
  double amplitude = 1.0;
  bool interleaved = false;  ///< Pairs (2i, 2i + 1); otherwise (i, i + R / 2).
};
/// theta^(-2i / R).
Rotary rotary(std::int64_t dim, double theta, bool interleaved);
/// YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models"),
/// with DeepSeek's amplitude mscale(factor, mscale) / mscale(factor, mscale_all_dim).
struct Yarn {
  double factor = 1;
  double original_max_position = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
};
Rotary rotary_yarn(std::int64_t dim, double theta, bool interleaved, const Yarn& yarn);
/// 0.1 * m * ln(factor) + 1 for factor > 1, else 1.
double yarn_mscale(double factor, double m);
/// LongRoPE (Ding et al. 2024): frequency i over divisors[i] [dim / 2], with amplitude
/// sqrt(1 + ln(max / original) / ln(original)) beyond the original length.
Rotary rotary_long(std::int64_t dim, double theta, bool interleaved,
                   std::span<const double> divisors, double max_position,
                   double original_max_position);
/// In place over x [rows, heads, 2 * inv_freq.size()] at positions [rows].
void rotate(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
            const Rotary& rotary);

/// Weights of one MLA layer, as in a checkpoint. Empty q_a_proj: q_b_proj reads the hidden states.
struct MlaWeights {
  std::int64_t hidden_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t q_lora_rank = 0;  ///< 0: none.
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  double sm_scale = 0;
  double rms_norm_eps = 1e-6;
  std::vector<double> q_a_proj;        ///< [q_lora_rank, hidden]
  std::vector<double> q_a_bias;        ///< [q_lora_rank] or empty
  std::vector<double> q_a_layernorm;   ///< [q_lora_rank]
  std::vector<double> q_b_proj;        ///< [heads * (nope + rope), q_lora_rank or hidden]
  std::vector<double> kv_a_proj;       ///< [kv_lora_rank + rope, hidden]
  std::vector<double> kv_a_bias;       ///< [kv_lora_rank + rope] or empty
  std::vector<double> kv_a_layernorm;  ///< [kv_lora_rank]
  std::vector<double> kv_b_proj;       ///< [heads * (nope + v), kv_lora_rank], per head nope then v
  std::vector<double> o_proj;          ///< [hidden, heads * v]
  std::vector<double> o_bias;          ///< [hidden] or empty
  Rotary rotary;
};

/// What is stored for tokens: [kv_lora_rank + rope] per row, normed latent then rotated key.
std::vector<double> mla_latent_rows(const MlaWeights& weights, std::span<const double> hidden,
                                    std::span<const std::int64_t> positions);

/// Queries [rows, heads, nope + rope], the rope part rotated.
std::vector<double> mla_queries(const MlaWeights& weights, std::span<const double> hidden,
                                std::span<const std::int64_t> positions);

/// Attention output before o_proj, [num_queries, heads * v], over latent rows [num_keys, L + R], by
/// expanding every row's keys and values (`expanded`) or by moving the products to the queries:
/// equal but for float64 rounding.
enum class MlaForm { expanded, absorbed };
std::vector<double> mla_attention(const MlaWeights& weights, std::span<const double> queries,
                                  std::span<const double> latent_rows, bool causal, MlaForm form);

/// The whole layer after o_proj, [num_queries, hidden]: hidden states of the last tokens of a
/// sequence at `positions`, attending to `latent_rows`, which already hold theirs.
std::vector<double> mla_layer(const MlaWeights& weights, std::span<const double> hidden,
                              std::span<const std::int64_t> positions,
                              std::span<const double> latent_rows, MlaForm form);

}  // namespace fovea::oracle
