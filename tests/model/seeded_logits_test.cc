// Attention over seeded weights looks like a trained model's, for every preset.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "model/moments.h"
#include "model/oracle_weights.h"
#include "model/seeded_weights.h"

namespace fovea {
namespace {

using test::moments;

LayerMemory make(const ModelConfig& config, std::int64_t layer) {
  return seeded_layer(config, 0, layer, DType::f32, *make_std_thread_pool(2));
}

/// Logits of each head for one query: those of the keys before it, its own last.
struct HeadLogits {
  std::int64_t head;
  std::vector<double> logits;
};

/// Normed hidden states of the first tokens, and their positions.
struct LayerInput {
  std::vector<double> hidden;
  std::vector<std::int64_t> positions;
};

LayerInput make_input(const LayerMemory& layer, std::int64_t hidden_size, std::int64_t num_tokens) {
  LayerInput input;
  const Tensor row = Tensor::empty(DType::f32, {hidden_size});
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    token_hidden_state(0, 17 * t + 5, row);
    const std::vector<double> x = test::to_doubles(row);
    input.hidden.insert(input.hidden.end(), x.begin(), x.end());
    input.positions.push_back(t);
  }
  input.hidden =
      oracle::rms_norm(input.hidden, test::to_doubles(layer.tensors.input_layernorm), 1e-6);
  return input;
}

/// Of the last `num_queries` of `num_tokens` tokens, in float64.
std::vector<HeadLogits> measure_logits(const ModelConfig& config, const LayerMemory& layer,
                                       std::int64_t num_tokens, std::int64_t num_queries) {
  const MlaDims& d = config.mla;
  oracle::MlaWeights weights = test::oracle_weights(config, layer.tensors.mla);
  weights.o_proj.clear();
  const auto [hidden, positions] = make_input(layer, d.hidden_size, num_tokens);
  const std::vector<double> rows = oracle::mla_latent_rows(weights, hidden, positions);
  const std::vector<double> queries = oracle::mla_queries(
      weights, std::span(hidden).last(static_cast<std::size_t>(num_queries * d.hidden_size)),
      std::span(positions).last(static_cast<std::size_t>(num_queries)));

  std::vector<HeadLogits> result;
  for (std::int64_t i = 0; i < num_queries * d.num_heads; ++i) {
    const std::int64_t head = i % d.num_heads;
    const std::int64_t keys = num_tokens - num_queries + i / d.num_heads + 1;
    const double* query = queries.data() + i * d.qk_head_dim();
    std::vector<double> absorbed(static_cast<std::size_t>(d.latent_dim()), 0.0);
    for (std::int64_t p = 0; p < d.qk_nope_head_dim; ++p) {
      const double* w_uk = weights.kv_b_proj.data() +
                           (head * (d.qk_nope_head_dim + d.v_head_dim) + p) * d.kv_lora_rank;
      for (std::int64_t l = 0; l < d.kv_lora_rank; ++l) {
        absorbed[static_cast<std::size_t>(l)] += query[p] * w_uk[l];
      }
    }
    std::copy(query + d.qk_nope_head_dim, query + d.qk_head_dim(),
              absorbed.begin() + d.kv_lora_rank);
    HeadLogits& of_head = result.emplace_back(HeadLogits{head, {}});
    for (std::int64_t t = 0; t < keys; ++t) {
      of_head.logits.push_back(d.sm_scale * std::inner_product(absorbed.begin(), absorbed.end(),
                                                               rows.begin() + t * d.latent_dim(),
                                                               0.0));
    }
  }
  return result;
}

/// The same of grouped queries.
std::vector<HeadLogits> measure_gqa_logits(const ModelConfig& config, const LayerMemory& layer,
                                           const KvGroupConfig& group, std::int64_t num_tokens,
                                           std::int64_t num_queries) {
  const GqaDims& d = config.gqa;
  oracle::GqaWeights weights = test::oracle_weights(config, layer.tensors.gqa, group);
  const auto [hidden, positions] = make_input(layer, d.hidden_size, num_tokens);
  const std::vector<double> rows = oracle::gqa_rows(weights, hidden, positions);
  const std::vector<double> queries = oracle::gqa_queries(
      weights, std::span(hidden).last(static_cast<std::size_t>(num_queries * d.hidden_size)),
      std::span(positions).last(static_cast<std::size_t>(num_queries)));
  std::vector<HeadLogits> result;
  for (std::int64_t i = 0; i < num_queries * d.num_heads; ++i) {
    const std::int64_t head = i % d.num_heads;
    const std::int64_t keys = num_tokens - num_queries + i / d.num_heads + 1;
    const double* query = queries.data() + i * d.head_dim;
    const std::int64_t column = head / (d.num_heads / d.num_kv_heads) * d.head_dim;
    HeadLogits& of_head = result.emplace_back(HeadLogits{head, {}});
    for (std::int64_t t = 0; t < keys; ++t) {
      const double* key = rows.data() + t * (d.k_size() + d.v_size()) + column;
      of_head.logits.push_back(d.sm_scale *
                               std::inner_product(query, query + d.head_dim, key, 0.0));
    }
  }
  return result;
}

std::vector<double> softmax(std::span<const double> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> weights;
  for (const double x : logits) weights.push_back(std::exp(x - top));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum;
  return weights;
}

double mean(std::span<const double> x) { return moments(x).mean; }

const PresetInfo& preset_of(std::string_view name) {
  const auto& presets = model_presets();
  return *std::find_if(presets.begin(), presets.end(),
                       [&](const PresetInfo& p) { return p.name == name; });
}

/// Of all heads, and of their kinds.
struct LogitStatistics {
  std::vector<double> stds, peaked, plain, own_weights;
};

LogitStatistics statistics(const std::vector<HeadLogits>& all) {
  LogitStatistics result;
  for (const auto& [head, logits] : all) {
    // To a local head the token itself is the exception, not part of the spread.
    const double std = moments(std::span(logits).first(logits.size() - 1)).std;
    result.stds.push_back(std);
    if (head % 8 == 3) {
      result.peaked.push_back(std);
    } else if (head % 8 == 5) {
      result.own_weights.push_back(softmax(logits).back());
    } else {
      result.plain.push_back(std);
    }
  }
  return result;
}

constexpr std::int64_t kTokens = 128, kQueries = 8;

class PresetLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(PresetLogits, LookLikeATrainedModels) {
  ModelConfig config = preset_of(GetParam()).config;
  // The largest models' statistics do not depend on these; their size would only cost time.
  config.mla.num_heads = std::min<std::int64_t>(config.mla.num_heads, 16);
  config.mla.hidden_size = std::min<std::int64_t>(config.mla.hidden_size, 512);
  config.hidden_size = config.mla.hidden_size;
  const LayerMemory layer = make(config, 0);
  const LogitStatistics s = statistics(measure_logits(config, layer, kTokens, kQueries));
  EXPECT_GE(mean(s.stds), 3.0);
  EXPECT_LE(mean(s.stds), 6.0);
  EXPECT_GT(mean(s.peaked), 1.25 * mean(s.plain));
  EXPECT_GT(mean(s.own_weights), 0.25);

  // The largest latent channels stand out from the rest.
  std::vector<double> norm = test::to_doubles(layer.tensors.mla.kv_a_layernorm);
  std::sort(norm.begin(), norm.end());
  EXPECT_GT(norm.back(), 4 * norm[norm.size() / 2]);
}

class GqaPresetLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(GqaPresetLogits, LookLikeATrainedModels) {
  ModelConfig config = preset_of(GetParam()).config;
  const std::int64_t group_size = config.gqa.num_heads / config.gqa.num_kv_heads;
  config.gqa.num_kv_heads = std::max<std::int64_t>(8 / group_size, 1);
  config.gqa.num_heads = config.gqa.num_kv_heads * group_size;
  config.gqa.hidden_size = config.hidden_size = 256;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const auto at = std::find(config.layer_group.begin(), config.layer_group.end(), g);
    const LayerMemory layer = make(config, at - config.layer_group.begin());
    const LogitStatistics s =
        statistics(measure_gqa_logits(config, layer, config.groups[g], kTokens, kQueries));
    EXPECT_GE(mean(s.stds), config.qk_norm == QkNorm::none ? 2.8 : 1.4);
    EXPECT_LE(mean(s.stds), 6.0);
    EXPECT_GT(mean(s.own_weights), 0.25);
    // Norms leave all heads alike.
    if (config.qk_norm == QkNorm::none) {
      EXPECT_GT(mean(s.peaked), 1.2 * mean(s.plain));
    }
  }
}

std::string preset_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Presets, PresetLogits,
                         ::testing::Values("deepseek-v2", "deepseek-v2-lite", "deepseek-v3",
                                           "kimi-k2", "minicpm3-4b", "glm-4.7-flash"),
                         preset_name);
INSTANTIATE_TEST_SUITE_P(Presets, GqaPresetLogits,
                         ::testing::Values("gpt-oss-20b", "llama-2-7b", "llama-3-8b", "qwen2-7b",
                                           "qwen3-8b", "mistral-7b", "gemma-3-4b"),
                         preset_name);

}  // namespace
}  // namespace fovea
