#include <gtest/gtest.h>

#include <cmath>

#include "fovea/model.h"
#include "model/checkpoint_files.h"

namespace fovea {
namespace {

using test::error_of;
using test::json;
using test::mentions;
using test::tiny_config;

ModelConfig parse(const json& config) { return parse_model_config(config.dump(), "c.json"); }

template <class Change>
ModelConfig changed(Change&& change) {
  json config = tiny_config();
  change(config);
  return parse(config);
}

template <class Change>
std::string refused(ErrorCode code, Change&& change) {
  return error_of(code, [&] { changed(change); });
}

TEST(ModelConfig, DimensionsAndDefaultsAreRead) {
  const ModelConfig config = parse(tiny_config());
  EXPECT_EQ(config.model_type, "deepseek_v3");
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.mla.hidden_size, 16);
  EXPECT_EQ(config.mla.num_heads, 2);
  EXPECT_EQ(config.mla.q_lora_rank, 6);
  EXPECT_EQ(config.mla.kv_lora_rank, 8);
  EXPECT_EQ(config.mla.qk_nope_head_dim, 4);
  EXPECT_EQ(config.mla.qk_rope_head_dim, 2);
  EXPECT_EQ(config.mla.v_head_dim, 3);
  EXPECT_EQ(config.vocab_size, 100);
  EXPECT_EQ(config.max_position, 640);
  EXPECT_EQ(config.dtype, DType::f32);
  EXPECT_EQ(config.residual_scale, 1.f);
  EXPECT_EQ(config.latent_norm_eps, 1e-6f);
  EXPECT_FALSE(config.attention_bias);
  EXPECT_EQ(config.groups[0].rope.dim, 2);
  EXPECT_EQ(config.groups[0].rope.max_position, 640);
  EXPECT_EQ(config.groups[0].rope.pairing, RopePairing::interleaved);
  ASSERT_EQ(config.groups.size(), 1u);
  EXPECT_EQ(config.groups[0].variant, AttentionVariant{});
  EXPECT_EQ(config.layer_group, (std::vector<std::int32_t>{0, 0}));
  const auto& yarn = std::get<YarnScaling>(config.groups[0].rope.scaling);
  EXPECT_EQ(yarn.factor, 40);
  EXPECT_EQ(yarn.original_max_position, 16);
}

TEST(ModelConfig, UncompressedQueriesAreNullNotAbsent) {
  EXPECT_EQ(changed([](json& c) { c["q_lora_rank"] = nullptr; }).mla.q_lora_rank, 0);
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, [](json& c) { c.erase("q_lora_rank"); }),
                       {"q_lora_rank"}));
}

// F265, F281, B145
TEST(ModelConfig, SoftmaxScaleHoldsTheSquareOfYarnsMscale) {
  auto scale = [](double all_dim, double mscale) {
    return changed([&](json& c) {
             c["qk_nope_head_dim"] = 128;
             c["qk_rope_head_dim"] = 64;
             c["rope_scaling"]["mscale"] = mscale;
             c["rope_scaling"]["mscale_all_dim"] = all_dim;
           })
        .mla.sm_scale;
  };
  EXPECT_NEAR(scale(1, 1), 0.135234, 1e-6);
  EXPECT_NEAR(scale(0.707, 0.707), 0.114721, 1e-6);
  EXPECT_NEAR(scale(0.5, 1), std::pow(0.05 * std::log(40.0) + 1, 2) / std::sqrt(192.0), 1e-7);
  EXPECT_NEAR(scale(0, 1), 1 / std::sqrt(192.0), 1e-7);
}

TEST(ModelConfig, RopeParametersOfNewerFilesMeanTheSame) {
  const ModelConfig old_style = parse(tiny_config());
  const ModelConfig new_style = changed([](json& c) {
    c["rope_parameters"] = c["rope_scaling"];
    c["rope_parameters"]["rope_type"] = "yarn";
    c["rope_parameters"]["rope_theta"] = c["rope_theta"];
    c.erase("rope_scaling");
    c.erase("rope_theta");
    c["dtype"] = "bfloat16";
  });
  EXPECT_EQ(new_style.groups[0].rope.theta, old_style.groups[0].rope.theta);
  EXPECT_EQ(new_style.mla.sm_scale, old_style.mla.sm_scale);
  EXPECT_EQ(std::get<YarnScaling>(new_style.groups[0].rope.scaling).mscale, 1);
  EXPECT_EQ(new_style.dtype, DType::bf16);
}

TEST(ModelConfig, YarnsAmplitudeAndRampAreRead) {
  const ModelConfig config = changed([](json& c) {
    c["rope_scaling"]["attention_factor"] = 1.25;
    c["rope_scaling"]["truncate"] = false;
  });
  const auto& yarn = std::get<YarnScaling>(config.groups[0].rope.scaling);
  EXPECT_EQ(yarn.attention_factor, 1.25);
  EXPECT_FALSE(yarn.truncate);
  EXPECT_TRUE(std::get<YarnScaling>(parse(tiny_config()).groups[0].rope.scaling).truncate);
  // The amplitude is no part of the softmax scale.
  EXPECT_EQ(config.mla.sm_scale, parse(tiny_config()).mla.sm_scale);
}

TEST(ModelConfig, NoScalingUnderAllItsSpellings) {
  auto plain = [](json scaling) {
    return changed([&](json& c) {
      c["rope_theta"] = 50000;
      c["rope_scaling"] = scaling;
    });
  };
  for (const json& scaling :
       {json(), json::object({{"type", "default"}}), json::object({{"rope_type", "default"}}),
        json{{"rope_theta", 50000}, {"partial_rotary_factor", 1.0}}}) {
    const ModelConfig config = plain(scaling);
    EXPECT_TRUE(std::holds_alternative<std::monostate>(config.groups[0].rope.scaling)) << scaling;
    EXPECT_EQ(config.groups[0].rope.theta, 50000);
    EXPECT_NEAR(config.mla.sm_scale, 1 / std::sqrt(6.0), 1e-7);
  }
}

// F279
TEST(ModelConfig, PairingFollowsTheModelType) {
  auto pairing = [](const char* type, std::optional<bool> interleave) {
    return changed([&](json& c) {
             c["model_type"] = type;
             c["scale_depth"] = 1.4;
             if (interleave) c["rope_interleave"] = *interleave;
           })
        .groups[0]
        .rope.pairing;
  };
  for (const char* type : {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}) {
    EXPECT_EQ(pairing(type, {}), RopePairing::interleaved) << type;
  }
  EXPECT_EQ(pairing("minicpm3", {}), RopePairing::neox);
  EXPECT_EQ(pairing("glm4_moe_lite", false), RopePairing::neox);
  EXPECT_EQ(pairing("deepseek_v3", true), RopePairing::interleaved);
  EXPECT_TRUE(mentions(error_of(ErrorCode::unsupported, [&] { pairing("deepseek_v2", false); }),
                       {"rope_interleave"}));
}

TEST(ModelConfig, MiniCpmHasLongRopeAndScaledResiduals) {
  auto minicpm = [](auto&& change) {
    return changed([&](json& c) {
      c["model_type"] = "minicpm3";
      c["num_hidden_layers"] = 49;
      c["scale_depth"] = 1.4;
      c.erase("v_head_dim");
      c["qk_rope_head_dim"] = 4;
      c["rope_scaling"] = {{"type", "longrope"},
                           {"short_factor", {1.0, 1.5}},
                           {"long_factor", {2.0, 3.5}},
                           {"original_max_position_embeddings", 320}};
      change(c);
    });
  };
  const ModelConfig config = minicpm([](json&) {});
  EXPECT_EQ(config.mla.v_head_dim, 8);
  EXPECT_NEAR(config.residual_scale, 0.2, 1e-7);
  const auto& longrope = std::get<LongRopeScaling>(config.groups[0].rope.scaling);
  EXPECT_EQ(longrope.short_factor, (std::vector<double>{1.0, 1.5}));
  EXPECT_EQ(longrope.long_factor, (std::vector<double>{2.0, 3.5}));
  EXPECT_EQ(longrope.original_max_position, 320);
  EXPECT_EQ(longrope.max_position, 640);
  EXPECT_EQ(minicpm([](json& c) { c["scale_depth"] = nullptr; }).residual_scale, 1.f);

  auto refused_minicpm = [&](ErrorCode code, auto&& change) {
    return error_of(code, [&] { minicpm(change); });
  };
  EXPECT_TRUE(mentions(refused_minicpm(ErrorCode::corrupt_file,
                                       [](json& c) { c["rope_scaling"]["long_factor"] = {1.0}; }),
                       {"rope_scaling.long_factor", "2 numbers"}));
  EXPECT_TRUE(mentions(refused_minicpm(ErrorCode::corrupt_file,
                                       [](json& c) {
                                         c["rope_scaling"]["long_factor"] = {1.0, "x"};
                                       }),
                       {"rope_scaling.long_factor", "x"}));
  EXPECT_TRUE(mentions(refused_minicpm(ErrorCode::unsupported,
                                       [](json& c) { c["rope_scaling"]["attention_factor"] = 1; }),
                       {"rope_scaling.attention_factor"}));
  EXPECT_TRUE(
      mentions(refused_minicpm(ErrorCode::corrupt_file, [](json& c) { c.erase("scale_depth"); }),
               {"scale_depth"}));
}

TEST(ModelConfig, EveryNeededFieldIsMissedByName) {
  for (const char* key : {"model_type", "hidden_size", "num_attention_heads", "num_hidden_layers",
                          "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                          "max_position_embeddings", "rms_norm_eps", "vocab_size"}) {
    EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file, [&](json& c) { c.erase(key); }),
                         {"c.json", key, "missing"}));
  }
  for (const char* key : {"factor", "original_max_position_embeddings"}) {
    EXPECT_TRUE(
        mentions(refused(ErrorCode::corrupt_file, [&](json& c) { c["rope_scaling"].erase(key); }),
                 {"c.json", "rope_scaling", key, "missing"}));
  }
}

TEST(ModelConfig, WrongTypesAndValuesAreRefusedByName) {
  auto wrong = [](const char* key, const json& value) {
    return refused(ErrorCode::corrupt_file, [&](json& c) { c[key] = value; });
  };
  const json bad_integers[] = {-1, 0, 2.5, "16", true, json::array({16}), ~0ull, 1ll << 40};
  for (const char* key : {"hidden_size", "num_attention_heads", "num_hidden_layers", "kv_lora_rank",
                          "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
                          "max_position_embeddings", "vocab_size"}) {
    for (const json& value : bad_integers) {
      EXPECT_TRUE(mentions(wrong(key, value), {"c.json", key, "integer"})) << value;
    }
  }
  EXPECT_TRUE(mentions(wrong("qk_rope_head_dim", 3), {"qk_rope_head_dim is 3", "even"}));
  EXPECT_TRUE(mentions(wrong("rms_norm_eps", "small"), {"rms_norm_eps"}));
  EXPECT_TRUE(mentions(wrong("rms_norm_eps", -1e-6), {"rms_norm_eps"}));
  EXPECT_TRUE(mentions(wrong("rms_norm_eps", 1e300), {"rms_norm_eps"}));
  EXPECT_TRUE(mentions(wrong("rope_theta", 0), {"rope_theta"}));
  EXPECT_TRUE(mentions(wrong("attention_bias", 1), {"attention_bias", "true or false"}));
  EXPECT_TRUE(mentions(wrong("rope_scaling", 4), {"rope_scaling", "object"}));
  EXPECT_TRUE(mentions(wrong("torch_dtype", 4), {"torch_dtype", "text"}));
  EXPECT_TRUE(
      mentions(refused(ErrorCode::corrupt_file, [](json& c) { c["rope_scaling"]["factor"] = 0.5; }),
               {"rope_scaling.factor"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file,
                               [](json& c) { c["rope_scaling"]["rope_type"] = "longrope"; }),
                       {"rope_type", "type", "differ"}));
}

TEST(ModelConfig, WhatIsNotSupportedIsRefusedByName) {
  auto unsupported = [](const char* key, const json& value) {
    return refused(ErrorCode::unsupported, [&](json& c) { c[key] = value; });
  };
  EXPECT_TRUE(mentions(unsupported("model_type", "mamba"), {"model_type", "mamba", "kimi_k2"}));
  EXPECT_TRUE(mentions(unsupported("quantization_config", {{"quant_method", "awq"}}),
                       {"quantization_config.quant_method", "awq", "compressed-tensors"}));
  EXPECT_TRUE(mentions(unsupported("torch_dtype", "float8_e4m3fn"), {"torch_dtype"}));
  EXPECT_TRUE(mentions(unsupported("num_key_value_heads", 1), {"num_key_value_heads is 1"}));
  EXPECT_TRUE(mentions(unsupported("sliding_window", 4096), {"sliding_window"}));
  EXPECT_TRUE(mentions(unsupported("index_topk", 2048), {"index_topk"}));
  EXPECT_TRUE(mentions(unsupported("partial_rotary_factor", 0.5), {"partial_rotary_factor"}));
  EXPECT_TRUE(mentions(unsupported("layer_types", {"full_attention", "sliding_attention"}),
                       {"layer_types"}));
  EXPECT_NO_THROW(changed([](json& c) {
    c["sliding_window"] = nullptr;
    c["use_sliding_window"] = false;
    c["quantization_config"] = nullptr;
    c["layer_types"] = {"full_attention", "full_attention"};
  }));

  auto unsupported_rope = [](const char* key, const json& value) {
    return refused(ErrorCode::unsupported, [&](json& c) { c["rope_scaling"][key] = value; });
  };
  EXPECT_TRUE(mentions(unsupported_rope("type", "proportional"),
                       {"rope_scaling.rope_type", "proportional"}));
  EXPECT_TRUE(mentions(unsupported_rope("type", "linear"), {"rope_scaling."}));
  EXPECT_TRUE(mentions(unsupported_rope("mrope_section", {1, 2}), {"rope_scaling.mrope_section"}));
  EXPECT_TRUE(mentions(unsupported_rope("mscale", 0), {"mscale", "mscale_all_dim"}));
  EXPECT_TRUE(
      mentions(refused(ErrorCode::unsupported, [](json& c) { c["rope_scaling"].erase("mscale"); }),
               {"mscale", "mscale_all_dim"}));
}

TEST(ModelConfig, TextThatIsNoJsonObjectIsRefused) {
  auto refused_text = [](const std::string& text) {
    return error_of(ErrorCode::corrupt_file, [&] { parse_model_config(text, "c.json"); });
  };
  for (const char* text :
       {"", "{", "[]", "5", "nul", "{\"a\": NaN}", "{\"a\": 1e999}", "{\"\xff\": 1}", "{} {}"}) {
    EXPECT_TRUE(mentions(refused_text(text), {"c.json"})) << text;
  }
  EXPECT_TRUE(mentions(refused_text("{\"a\":" + std::string(100000, '[')), {"nests deeper"}));
  EXPECT_TRUE(mentions(refused_text(std::string((16 << 20) + 1, ' ')), {"more than"}));
}

}  // namespace
}  // namespace fovea
