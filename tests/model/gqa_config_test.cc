// What published config.json files mean, and what is wrong with them when one field changes.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "fovea/model.h"
#include "model/checkpoint_files.h"
#include "model/published_configs.h"

namespace fovea {
namespace {

using test::error_of;
using test::gemma3_config;
using test::gemma3_text_config;
using test::gpt_oss_config;
using test::json;
using test::llama_3_1_config;
using test::mentions;
using test::mistral_config;
using test::qwen2_config;
using test::qwen3_config;

json repeated(const json& count, const char* type) {
  return json(count.get<std::size_t>(), json(type));
}

ModelConfig parse(const json& config) { return parse_model_config(config.dump(), "c.json"); }

template <class Change>
ModelConfig changed(json config, Change&& change) {
  change(config);
  return parse(config);
}

template <class Change>
std::string refused(ErrorCode code, const json& config, Change&& change) {
  return error_of(code, [&] { changed(config, change); });
}

/// Hidden size, heads, kv heads, D, Dv, layers, vocabulary and positions.
std::vector<std::int64_t> dims_of(const ModelConfig& c) {
  const GqaDims& d = c.gqa;
  EXPECT_EQ(c.hidden_size, d.hidden_size);
  EXPECT_FALSE(c.is_mla());
  return {d.hidden_size, d.num_heads,  d.num_kv_heads, d.head_dim,
          d.v_head_dim,  c.num_layers, c.vocab_size,   c.max_position};
}

TEST(GqaConfig, GptOssAlternatesWindowsAndHasSinks) {
  const ModelConfig c = parse(gpt_oss_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{2880, 64, 8, 64, 64, 24, 201088, 131072}));
  EXPECT_FLOAT_EQ(c.gqa.sm_scale, 0.125f);
  EXPECT_TRUE(c.attention_bias && c.o_bias && c.sinks);
  EXPECT_EQ(c.qk_norm, QkNorm::none);
  EXPECT_FALSE(c.post_attention_norm || c.norm_weights_minus_one);
  ASSERT_EQ(c.groups.size(), 2u);
  EXPECT_EQ(c.groups[0].variant.window_left, 127);
  EXPECT_EQ(c.groups[1].variant.window_left, -1);
  for (std::size_t i = 0; i < 24; ++i) EXPECT_EQ(c.layer_group[i], static_cast<int>(i % 2));
  for (const KvGroupConfig& group : c.groups) {
    EXPECT_EQ(group.rope.dim, 64);
    EXPECT_EQ(group.rope.theta, 150000);
    EXPECT_EQ(group.rope.pairing, RopePairing::neox);
    const auto& yarn = std::get<YarnScaling>(group.rope.scaling);
    EXPECT_EQ(yarn.factor, 32);
    EXPECT_EQ(yarn.original_max_position, 4096);
    EXPECT_FALSE(yarn.truncate);
    EXPECT_FALSE(yarn.attention_factor.has_value());
    // The amplitude is mscale(32, 1), and no part of the softmax scale.
    EXPECT_EQ(yarn.mscale, 1);
    EXPECT_EQ(yarn.mscale_all_dim, 0);
  }
}

TEST(GqaConfig, LlamaHasOneGroupAndItsOwnScaling) {
  const ModelConfig c = parse(llama_3_1_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{4096, 32, 8, 128, 128, 32, 128256, 131072}));
  EXPECT_FLOAT_EQ(c.gqa.sm_scale, static_cast<float>(1 / std::sqrt(128.0)));
  ASSERT_EQ(c.groups.size(), 1u);
  EXPECT_EQ(c.groups[0].variant, AttentionVariant{});
  const auto& scaling = std::get<Llama3Scaling>(c.groups[0].rope.scaling);
  EXPECT_EQ(scaling.factor, 8);
  EXPECT_EQ(scaling.low_freq_factor, 1);
  EXPECT_EQ(scaling.high_freq_factor, 4);
  EXPECT_EQ(scaling.original_max_position, 8192);
  EXPECT_FALSE(c.attention_bias || c.o_bias || c.sinks);
  EXPECT_EQ(c.dtype, DType::bf16);

  const ModelConfig biased = changed(llama_3_1_config(), [](json& j) {
    j["attention_bias"] = true;
    j["head_dim"] = 64;
    j.erase("num_key_value_heads");
  });
  EXPECT_TRUE(biased.attention_bias && biased.o_bias);
  EXPECT_EQ(biased.gqa.head_dim, 64);
  EXPECT_EQ(biased.gqa.num_kv_heads, 32);
}

TEST(GqaConfig, EveryScalingOfRotationIsRead) {
  auto rope = [](const json& scaling) {
    return changed(llama_3_1_config(), [&](json& j) { j["rope_scaling"] = scaling; })
        .groups[0]
        .rope;
  };
  EXPECT_EQ(std::get<LinearScaling>(rope({{"type", "linear"}, {"factor", 4.0}}).scaling).factor, 4);
  const auto dynamic =
      std::get<DynamicNtkScaling>(rope({{"rope_type", "dynamic"}, {"factor", 2.0}}).scaling);
  EXPECT_EQ(dynamic.factor, 2);
  EXPECT_EQ(dynamic.original_max_position, 131072);
  const auto yarn = std::get<YarnScaling>(rope({{"rope_type", "yarn"},
                                                {"factor", 4.0},
                                                {"attention_factor", 1.25},
                                                {"original_max_position_embeddings", 32768}})
                                              .scaling);
  EXPECT_EQ(yarn.attention_factor, 1.25);
  EXPECT_TRUE(yarn.truncate);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(rope(nullptr).scaling));
}

TEST(GqaConfig, Qwen2HasBiasesWithoutOneOfTheOutput) {
  const ModelConfig c = parse(qwen2_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{3584, 28, 4, 128, 128, 28, 152064, 131072}));
  EXPECT_TRUE(c.attention_bias);
  EXPECT_FALSE(c.o_bias);
  EXPECT_EQ(c.qk_norm, QkNorm::none);
  ASSERT_EQ(c.groups.size(), 1u);
  EXPECT_EQ(c.groups[0].variant.window_left, -1);  // Switched off, whatever its width.
}

TEST(GqaConfig, QwenWindowsBeginAtALayerOrFollowTheTypes) {
  const ModelConfig late = changed(qwen2_config(), [](json& j) {
    j["use_sliding_window"] = true;
    j["sliding_window"] = 4096;
  });
  ASSERT_EQ(late.groups.size(), 2u);
  EXPECT_EQ(late.groups[0].variant.window_left, -1);
  EXPECT_EQ(late.groups[1].variant.window_left, 4095);
  for (std::size_t i = 0; i < 28; ++i) EXPECT_EQ(late.layer_group[i], i >= 20 ? 1 : 0);

  const ModelConfig all = changed(qwen2_config(), [](json& j) {
    j["use_sliding_window"] = true;
    j["max_window_layers"] = 0;
  });
  ASSERT_EQ(all.groups.size(), 1u);
  EXPECT_EQ(all.groups[0].variant.window_left, 131071);

  const ModelConfig by_type = changed(qwen3_config(), [](json& j) {
    j["num_hidden_layers"] = 3;
    j["use_sliding_window"] = true;
    j["sliding_window"] = 8;
    j["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  });
  EXPECT_EQ(by_type.layer_group, (std::vector<std::int32_t>{0, 1, 0}));
}

TEST(GqaConfig, Qwen3NormsQueriesAndKeysBeforeTheyTurn) {
  const ModelConfig c = parse(qwen3_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{4096, 32, 8, 128, 128, 36, 151936, 40960}));
  EXPECT_EQ(c.qk_norm, QkNorm::pre_rope);
  EXPECT_FLOAT_EQ(c.rms_norm_eps, 1e-6f);
  EXPECT_FALSE(c.attention_bias || c.o_bias || c.norm_weights_minus_one);
  EXPECT_EQ(c.groups[0].rope.theta, 1000000);
}

TEST(GqaConfig, MistralHasAWindowInEveryLayer) {
  const ModelConfig c = parse(mistral_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{4096, 32, 8, 128, 128, 32, 32000, 32768}));
  ASSERT_EQ(c.groups.size(), 1u);
  EXPECT_EQ(c.groups[0].variant.window_left, 4095);
  const ModelConfig full =
      changed(mistral_config(), [](json& j) { j["sliding_window"] = nullptr; });
  EXPECT_EQ(full.groups[0].variant.window_left, -1);
}

TEST(GqaConfig, GemmaWithVisionIsReadFromItsTextConfig) {
  const ModelConfig c = parse(gemma3_config());
  EXPECT_EQ(c.model_type, "gemma3_text");
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{2560, 8, 4, 256, 256, 34, 262208, 131072}));
  EXPECT_FLOAT_EQ(c.gqa.sm_scale, 0.0625f);
  EXPECT_EQ(c.dtype, DType::bf16);
  EXPECT_EQ(c.qk_norm, QkNorm::pre_rope);
  EXPECT_TRUE(c.post_attention_norm && c.norm_weights_minus_one);
  ASSERT_EQ(c.groups.size(), 2u);
  const KvGroupConfig& local = c.groups[0];
  EXPECT_EQ(local.variant.window_left, 1023);
  EXPECT_EQ(local.rope.theta, 10000);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(local.rope.scaling));
  const KvGroupConfig& full = c.groups[1];
  EXPECT_EQ(full.variant.window_left, -1);
  EXPECT_EQ(full.rope.theta, 1000000);
  EXPECT_EQ(std::get<LinearScaling>(full.rope.scaling).factor, 8);
  for (std::size_t i = 0; i < 34; ++i) EXPECT_EQ(c.layer_group[i], i % 6 == 5 ? 1 : 0);
}

TEST(GqaConfig, GemmaWithoutVisionMeansTheSameInEveryForm) {
  const ModelConfig c = parse(gemma3_text_config());
  EXPECT_EQ(dims_of(c), (std::vector<std::int64_t>{1152, 4, 1, 256, 256, 26, 262144, 32768}));
  EXPECT_EQ(c.groups[0].variant.window_left, 511);
  EXPECT_EQ(c.groups[0].variant.soft_cap, 0.f);

  const ModelConfig newer = changed(gemma3_text_config(), [](json& j) {
    for (const char* key :
         {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}) {
      j.erase(key);
    }
    j["rope_parameters"] = {
        {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2e6}}},
        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 20000}}}};
    for (int i = 0; i < 26; ++i) {
      j["layer_types"].push_back(i % 3 == 0 ? "full_attention" : "sliding_attention");
    }
    j["query_pre_attn_scalar"] = 168;
    j["attn_logit_softcapping"] = 30.0;
    j["dtype"] = "float16";
  });
  EXPECT_FLOAT_EQ(newer.gqa.sm_scale, static_cast<float>(1 / std::sqrt(168.0)));
  EXPECT_EQ(newer.dtype, DType::f16);
  ASSERT_EQ(newer.groups.size(), 2u);
  EXPECT_EQ(newer.groups[0].variant.window_left, -1);
  EXPECT_EQ(newer.groups[0].variant.soft_cap, 30.f);
  EXPECT_EQ(newer.groups[0].rope.theta, 2e6);
  EXPECT_EQ(std::get<LinearScaling>(newer.groups[0].rope.scaling).factor, 8);
  EXPECT_EQ(newer.groups[1].variant.window_left, 511);
  EXPECT_EQ(newer.groups[1].rope.theta, 20000);
  for (std::size_t i = 0; i < 26; ++i) EXPECT_EQ(newer.layer_group[i], i % 3 == 0 ? 0 : 1);

  // Left out, each part has its published value.
  const ModelConfig bare = changed(gemma3_text_config(), [](json& j) {
    for (const char* key : {"rope_theta", "rope_scaling", "rope_local_base_freq"}) j.erase(key);
    j["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}}}};
  });
  EXPECT_EQ(bare.groups[0].rope.theta, 10000);
  EXPECT_EQ(bare.groups[1].rope.theta, 1000000);
}

TEST(GqaConfig, EveryNeededFieldIsMissedByName) {
  const std::vector<const char*> common = {
      "hidden_size",  "num_attention_heads",     "num_hidden_layers", "vocab_size",
      "rms_norm_eps", "max_position_embeddings", "model_type"};
  const std::map<std::string, std::vector<const char*>> others = {
      {"gpt_oss", {"head_dim", "layer_types", "sliding_window", "rope_scaling"}},
      {"llama", {}},
      {"qwen2", {}},
      {"qwen3", {"head_dim"}},
      {"mistral", {"sliding_window"}}};
  for (const json& config :
       {gpt_oss_config(), llama_3_1_config(), qwen2_config(), qwen3_config(), mistral_config()}) {
    std::vector<const char*> keys = common;
    const auto& more = others.at(config["model_type"]);
    keys.insert(keys.end(), more.begin(), more.end());
    for (const char* key : keys) {
      EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, config, [&](json& j) { j.erase(key); }),
                           {"c.json", key, "missing"}))
          << config["model_type"];
    }
  }
  for (const char* key : {"hidden_size", "num_hidden_layers"}) {
    EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, gemma3_config(),
                                 [&](json& j) { j["text_config"].erase(key); }),
                         {"c.json", "text_config.", key, "missing"}));
  }
  // Null is no default.
  for (const char* key : {"sliding_window", "head_dim", "num_key_value_heads"}) {
    EXPECT_TRUE(mentions(
        refused(ErrorCode::corrupt_file, gemma3_text_config(), [&](json& j) { j[key] = nullptr; }),
        {key, "missing"}));
  }
  EXPECT_TRUE(mentions(
      refused(ErrorCode::corrupt_file, gemma3_config(), [](json& j) { j.erase("text_config"); }),
      {"text_config", "missing"}));
  for (const char* key : {"sliding_window", "max_window_layers"}) {
    EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, qwen2_config(),
                                 [&](json& j) {
                                   j["use_sliding_window"] = true;
                                   j.erase(key);
                                 }),
                         {key, "missing"}));
  }
  for (const char* key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, llama_3_1_config(),
                                 [&](json& j) { j["rope_scaling"].erase(key); }),
                         {"rope_scaling", key, "missing"}));
  }
}

TEST(GqaConfig, WrongTypesAndValuesAreRefusedByName) {
  auto wrong = [](const json& config, const char* key, const json& value) {
    return refused(ErrorCode::corrupt_file, config, [&](json& j) { j[key] = value; });
  };
  for (const char* key :
       {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "vocab_size", "max_position_embeddings", "sliding_window"}) {
    for (const json& value : {json(-1), json(0), json(2.5), json("16"), json(1ll << 40)}) {
      EXPECT_TRUE(mentions(wrong(gpt_oss_config(), key, value), {"c.json", key, "integer"}))
          << value;
    }
  }
  EXPECT_TRUE(mentions(wrong(llama_3_1_config(), "num_key_value_heads", 5),
                       {"num_key_value_heads is 5", "divide", "32"}));
  EXPECT_TRUE(
      mentions(wrong(llama_3_1_config(), "num_hidden_layers", 1 << 20), {"num_hidden_layers"}));
  EXPECT_TRUE(mentions(wrong(llama_3_1_config(), "hidden_size", 4097), {"head_dim", "4097", "32"}));
  EXPECT_TRUE(mentions(wrong(qwen3_config(), "head_dim", 65), {"head_dim is 65", "even"}));
  EXPECT_TRUE(mentions(wrong(qwen2_config(), "use_sliding_window", 1), {"use_sliding_window"}));
  EXPECT_TRUE(
      mentions(wrong(gpt_oss_config(), "layer_types", "full_attention"), {"layer_types", "list"}));
  EXPECT_TRUE(mentions(wrong(gpt_oss_config(), "layer_types", {"full_attention"}),
                       {"layer_types has 1 entries", "24"}));
  EXPECT_TRUE(mentions(wrong(gpt_oss_config(), "initial_context_length", 8192),
                       {"initial_context_length is 8192", "4096"}));
  EXPECT_TRUE(
      mentions(wrong(gemma3_text_config(), "query_pre_attn_scalar", 0), {"query_pre_attn_scalar"}));
  EXPECT_TRUE(
      mentions(wrong(gemma3_text_config(), "rope_local_base_freq", 1), {"rope_local_base_freq"}));
  EXPECT_TRUE(mentions(wrong(gemma3_text_config(), "sliding_window_pattern", 0),
                       {"sliding_window_pattern"}));
  EXPECT_TRUE(mentions(wrong(gemma3_config(), "text_config", 3), {"text_config", "object"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, llama_3_1_config(),
                               [](json& j) { j["rope_scaling"]["high_freq_factor"] = 1.0; }),
                       {"rope_scaling.high_freq_factor is 1", "low_freq_factor"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, gemma3_text_config(),
                               [](json& j) {
                                 j["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8}};
                                 j["rope_parameters"] = json::object();
                               }),
                       {"rope_parameters", "rope_scaling", "exclude"}));
}

TEST(GqaConfig, WhatIsNotSupportedIsRefusedByName) {
  auto unsupported = [](const json& config, const char* key, const json& value) {
    return refused(ErrorCode::unsupported, config, [&](json& j) { j[key] = value; });
  };
  for (const json& config : {gpt_oss_config(), llama_3_1_config(), qwen2_config(), qwen3_config(),
                             mistral_config(), gemma3_text_config()}) {
    for (const char* key : {"attention_chunk_size", "dual_chunk_attention_config", "use_mrope",
                            "clip_qkv", "no_rope_layers", "attention_multiplier",
                            "use_bidirectional_attention", "partial_rotary_factor"}) {
      const json value = std::string(key) == "partial_rotary_factor" ? json(0.5) : json(2);
      EXPECT_TRUE(mentions(unsupported(config, key, value), {"c.json", key}))
          << config["model_type"];
    }
    EXPECT_TRUE(mentions(unsupported(config, "layer_types",
                                     repeated(config["num_hidden_layers"], "chunked_attention")),
                         {"layer_types", "chunked_attention"}));
    EXPECT_TRUE(
        mentions(unsupported(config, "quantization_config",
                             {{"quant_method", "gptq"}, {"modules_to_not_convert", {"lm_head"}}}),
                 {"quantization_config", "gptq"}));
  }
  for (const json& config :
       {gpt_oss_config(), llama_3_1_config(), qwen2_config(), qwen3_config(), mistral_config()}) {
    for (const char* key : {"attn_logit_softcapping", "query_pre_attn_scalar",
                            "sliding_window_pattern", "rope_local_base_freq"}) {
      EXPECT_TRUE(mentions(unsupported(config, key, 50), {key})) << config["model_type"];
    }
  }
  EXPECT_TRUE(
      mentions(unsupported(llama_3_1_config(), "sliding_window", 4096), {"sliding_window"}));
  EXPECT_TRUE(
      mentions(unsupported(llama_3_1_config(), "layer_types", repeated(32, "sliding_attention")),
               {"layer_types", "full_attention"}));
  EXPECT_TRUE(mentions(unsupported(mistral_config(), "layer_types", repeated(32, "full_attention")),
                       {"layer_types", "sliding_attention"}));
  EXPECT_TRUE(
      mentions(unsupported(qwen2_config(), "layer_types", repeated(28, "sliding_attention")),
               {"layer_types", "full_attention"}));
  EXPECT_TRUE(
      mentions(unsupported(qwen2_config(), "attention_bias", false), {"attention_bias", "true"}));
  EXPECT_TRUE(
      mentions(unsupported(mistral_config(), "attention_bias", true), {"attention_bias", "false"}));
  EXPECT_TRUE(
      mentions(unsupported(mistral_config(), "use_sliding_window", true), {"use_sliding_window"}));
  EXPECT_TRUE(mentions(unsupported(gpt_oss_config(), "rope_ntk_alpha", 1), {"rope_ntk_alpha"}));
  EXPECT_TRUE(
      mentions(unsupported(gpt_oss_config(), "model_type", "gemma2"), {"gemma2", "gpt_oss"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::unsupported, gemma3_config(),
                               [](json& j) { j["text_config"]["model_type"] = "llama"; }),
                       {"text_config.model_type", "llama"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::unsupported, gemma3_text_config(),
                               [](json& j) {
                                 j["rope_parameters"] = {{"rope_type", "default"}};
                               }),
                       {"rope_parameters.rope_type"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::unsupported, llama_3_1_config(),
                               [](json& j) { j["rope_scaling"]["truncate"] = true; }),
                       {"rope_scaling.truncate"}));
}

}  // namespace
}  // namespace fovea
