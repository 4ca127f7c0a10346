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

/// Element types that the oracle decodes by itself. i4: two's complement, two per byte, low nibble
/// first.
enum class Format { f32, f16, bf16, f8e4m3fn, f8e5m2, i8, i4 };

/// `count` elements of `format` at `bytes`, exactly.
std::vector<double> decode(const void* bytes, std::int64_t count, Format format);

/// Where the scales of a stored row of keys or values are.
enum class RowScales {
  none,
  per_tensor,  ///< RowFormat::scale.
  per_token,   ///< Each head is followed by float32 scales of its first group and of the rest.
  ds_mla,      ///< 512 f8e4m3fn, 4 float32 scales of 128 each, 64 bf16.
};
struct RowFormat {
  Format format = Format::f32;
  RowScales scales = RowScales::none;
  std::int64_t num_heads = 1;
  std::int64_t first_group = 0;  ///< Elements of a head under its first scale.
  double scale = 1;
};
/// The `count` values of a stored row.
std::vector<double> decode_row(const void* bytes, std::int64_t count, const RowFormat& row);

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
  /// The query at position p sees keys from p - window_left on; negative: all.
  std::int64_t window_left = -1;
  /// Windows count from the query's row instead of its position: what FlashInfer's reference of
  /// attention with sinks does in its prefill mode. The two differ where queries are fewer than
  /// keys.
  bool window_from_row = false;
  /// The query at position p sees keys from the last multiple of it up to p on; 0: all.
  std::int64_t attention_chunk = 0;
  double soft_cap = 0;  ///< Scores become soft_cap * tanh(score / soft_cap); 0: as they are.
  std::span<const double> sinks = {};  ///< [num_heads] in the denominator, not in lse; or empty.
  /// [num_queries] or empty: the queries are a tree of drafts, and their keys the last num_queries.
  /// Bit j of entry i: query i sees the key of query j. Positions are the number of other keys plus
  /// that of the query's ancestors.
  std::span<const std::uint64_t> draft_tree = {};
  std::span<const double> q;  ///< [num_queries, num_heads, qk_dim]
  std::span<const double> k;  ///< [num_keys, num_kv_heads, qk_dim]
  std::span<const double> v;  ///< [num_keys, num_kv_heads, v_dim]
};

struct AttentionResult {
  std::vector<double> out;  ///< [num_queries, num_heads, v_dim]; 0 where no key is visible.
  std::vector<double> lse;  ///< [num_heads, num_queries], natural log; -inf where none is visible.
};
AttentionResult attention(const Attention& problem);

/// Merge of two partial results of the same queries by the definition of lse. `sinks` [num_heads]
/// or empty: they join the denominator now, and no part has any.
AttentionResult merge(const AttentionResult& a, const AttentionResult& b, std::int64_t num_heads,
                      std::int64_t num_queries, std::int64_t v_dim,
                      std::span<const double> sinks = {});

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
/// with DeepSeek's amplitude mscale(factor, mscale) / mscale(factor, mscale_all_dim): by default
/// the paper's, 0.1 ln(factor) + 1.
struct Yarn {
  double factor = 1;
  double original_max_position = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  double attention_factor = 0;  ///< The amplitude itself; 0: from the two above.
  bool truncate = true;         ///< The ramp starts and ends at whole channel pairs.
};
Rotary rotary_yarn(std::int64_t dim, double theta, bool interleaved, const Yarn& yarn);
/// 0.1 * m * ln(factor) + 1 for factor > 1, else 1.
double yarn_mscale(double factor, double m);
/// LongRoPE (Ding et al. 2024): frequency i over divisors[i] [dim / 2], with amplitude
/// sqrt(1 + ln(max / original) / ln(original)) beyond the original length.
Rotary rotary_long(std::int64_t dim, double theta, bool interleaved,
                   std::span<const double> divisors, double max_position,
                   double original_max_position);
/// All frequencies divided by `factor`.
Rotary rotary_linear(std::int64_t dim, double theta, bool interleaved, double factor);
/// Dynamic NTK for sequences of up to `length` tokens: theta grows beyond the original length.
Rotary rotary_dynamic_ntk(std::int64_t dim, double theta, bool interleaved, double factor,
                          double length, double original_max_position);
/// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
struct Llama3 {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position = 0;
};
Rotary rotary_llama3(std::int64_t dim, double theta, bool interleaved, const Llama3& llama3);
/// In place over the first 2 * inv_freq.size() channels of x [rows, heads, head_dim] at positions
/// [rows]; head_dim 0: no other channels.
void rotate(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
            const Rotary& rotary, std::int64_t head_dim = 0);
/// The same with a position per row and channel pair: positions [rows, inv_freq.size()].
void rotate_pairs(std::span<double> x, std::span<const std::int64_t> positions, std::int64_t heads,
                  const Rotary& rotary, std::int64_t head_dim = 0);

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

/// Weights of one layer of grouped-query attention, as in a checkpoint.
struct GqaWeights {
  std::int64_t hidden_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_head_dim = 0;
  double sm_scale = 0;
  std::vector<double> q_proj;    ///< [heads * head_dim, hidden]
  std::vector<double> q_bias;    ///< [heads * head_dim] or empty
  std::vector<double> k_proj;    ///< [kv_heads * head_dim, hidden]
  std::vector<double> k_bias;    ///< [kv_heads * head_dim] or empty
  std::vector<double> v_proj;    ///< [kv_heads * v_head_dim, hidden]
  std::vector<double> v_bias;    ///< [kv_heads * v_head_dim] or empty
  std::vector<double> q_norm;    ///< [head_dim], [heads * head_dim] or empty
  std::vector<double> k_norm;    ///< [head_dim], [kv_heads * head_dim] or empty
  bool norm_after_rope = false;  ///< Else the norms come before.
  double rms_norm_eps = 1e-6;
  std::vector<double> o_proj;  ///< [hidden, heads * v_head_dim]
  std::vector<double> o_bias;  ///< [hidden] or empty
  std::vector<double> sinks;   ///< [heads] or empty
  Rotary rotary;               ///< No frequencies: nothing turns.
  std::int64_t window_left = -1;
  std::int64_t attention_chunk = 0;
  double soft_cap = 0;
};

/// What is stored for tokens: [kv_heads * (head_dim + v_head_dim)] per row, all keys, normed and
/// rotated, then all values. Positions here and below: [rows], or with several axes [rows, pairs],
/// as in rotate_pairs.
std::vector<double> gqa_rows(const GqaWeights& weights, std::span<const double> hidden,
                             std::span<const std::int64_t> positions);
/// Queries [rows, heads, head_dim], normed and rotated.
std::vector<double> gqa_queries(const GqaWeights& weights, std::span<const double> hidden,
                                std::span<const std::int64_t> positions);
/// Causal attention before o_proj, [num_queries, heads * v_head_dim], of the last tokens of a
/// sequence over its stored rows.
std::vector<double> gqa_attention(const GqaWeights& weights, std::span<const double> queries,
                                  std::span<const double> rows);
/// The whole layer after o_proj, [num_queries, hidden]: hidden states of the last tokens of a
/// sequence at `positions`, attending to `rows`, which already hold theirs.
std::vector<double> gqa_layer(const GqaWeights& weights, std::span<const double> hidden,
                              std::span<const std::int64_t> positions,
                              std::span<const double> rows);

}  // namespace fovea::oracle
