// Checkpoints with FP8 projections as they are published: what is read, what their layers compute,
// and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "engine/oracle_weights.h"
#include "fovea/model.h"
#include "model/checkpoint_files.h"
#include "model/oracle_weights.h"
#include "support/compare.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

using test::error_of;
using test::FileTensor;
using test::FileTensors;
using test::json;
using test::mentions;
using test::TempDir;

/// A published form: its quantization_config, and the groups that it means.
struct Form {
  const char* name;
  json config;
  const char* scale_suffix;
  WeightGroups weights;
  WeightGroups activations;
  bool scalar = false;  ///< A scale per tensor has no dimension, else one of 1.
  friend void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }
};

json compressed(const char* strategy) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", {"lm_head"}},
          {"kv_cache_scheme", {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations",
               {{"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}}},
              {"output_activations", nullptr},
              {"weights",
               {{"num_bits", 8},
                {"type", "float"},
                {"strategy", strategy},
                {"symmetric", true},
                {"dynamic", false},
                {"group_size", nullptr}}}}}}}};
}

std::vector<Form> forms() {
  const json deepseek = {{"quant_method", "fp8"},
                         {"fmt", "e4m3"},
                         {"activation_scheme", "dynamic"},
                         {"weight_block_size", {128, 128}}};
  json tall = deepseek;
  tall["weight_block_size"] = {64, 128};
  const json tensor = {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
  return {{"deepseek_v3", deepseek, "_scale_inv", {128, 128}, {1, 128}},
          {"blocks_of_64_by_128", tall, "_scale_inv", {64, 128}, {1, 128}},
          {"fp8_tensor", tensor, "_scale", {0, 0}, {0, 0}, true},
          {"compressed_tensor", compressed("tensor"), "_scale", {0, 0}, {1, 0}},
          {"compressed_channel", compressed("channel"), "_scale", {1, 0}, {1, 0}}};
}

std::uint64_t next_random() {
  static std::uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

FileTensor floats(std::vector<std::int64_t> shape, float low, float high) {
  FileTensor tensor = test::float_tensor(std::move(shape));
  for (std::size_t i = 0; i < tensor.bytes.size(); i += sizeof(float)) {
    const float value = low + (high - low) * static_cast<float>(next_random()) * 0x1p-31f;
    std::memcpy(tensor.bytes.data() + i, &value, sizeof value);
  }
  return tensor;
}

/// A checkpoint in one form, and the values of its projections in float64, by their names.
class Fp8Checkpoint {
 public:
  explicit Fp8Checkpoint(const Form& form) : form_(form) {}

  /// Codes of both signs from 2^-3 to 3.75 and scales around `spread`, no two alike.
  void add(const std::string& stem, std::int64_t out, std::int64_t in, float spread) {
    FileTensor codes{"F8_E4M3", {out, in}, {}};
    for (std::int64_t i = 0; i < out * in; ++i) {
      const std::uint64_t random = next_random();
      codes.bytes.push_back(static_cast<char>(0x20 + random % 0x28 + (random >> 20) % 2 * 0x80));
    }
    const std::int64_t rows = form_.weights.out == 0 ? out : form_.weights.out;
    const std::int64_t columns = form_.weights.in == 0 ? in : form_.weights.in;
    const std::int64_t scale_rows = (out + rows - 1) / rows;
    const std::int64_t scale_columns = (in + columns - 1) / columns;
    FileTensor scale = floats({scale_rows, scale_columns}, 0.5f * spread, 1.5f * spread);
    std::vector<double> decoded =
        oracle::decode(codes.bytes.data(), out * in, oracle::Format::f8e4m3fn);
    const std::vector<double> scales =
        oracle::decode(scale.bytes.data(), scale_rows * scale_columns, oracle::Format::f32);
    for (std::int64_t m = 0; m < out; ++m) {
      for (std::int64_t k = 0; k < in; ++k) {
        decoded[static_cast<std::size_t>(m * in + k)] *=
            scales[static_cast<std::size_t>(m / rows * scale_columns + k / columns)];
      }
    }
    if (form_.weights.out == 0) {
      scale.shape = form_.scalar ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1};
    }
    const std::string name = "model.layers.0.self_attn." + stem + ".weight";
    tensors[name] = std::move(codes);
    tensors[name + form_.scale_suffix] = std::move(scale);
    tensors["model.layers.0.self_attn." + stem + ".input_scale"] = floats({1}, 1, 2);
    values[stem] = std::move(decoded);
  }
  void add_norm(const std::string& name, std::int64_t size) {
    tensors["model.layers.0." + name + ".weight"] = floats({size}, 0.5f, 1.5f);
  }
  void write(const TempDir& dir, json config) const {
    config["quantization_config"] = form_.config;
    dir.write("config.json", config.dump());
    dir.write("model.safetensors", test::safetensors_bytes(tensors));
  }

  FileTensors tensors;
  std::map<std::string, std::vector<double>> values;

 private:
  Form form_;
};

constexpr std::int64_t kHidden = 160;

/// f32: sums of some hundred terms, of which softmax makes factors.
test::RowTolerance tolerance(DType dtype) {
  return test::row_tolerance(dtype, dtype == DType::f32 ? 64 : 16);
}

json mla_config() {
  json config = test::tiny_config();
  config.update({{"hidden_size", kHidden},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 4},
                 {"num_hidden_layers", 1},
                 {"q_lora_rank", 136},
                 {"kv_lora_rank", 144},
                 {"qk_nope_head_dim", 32},
                 {"qk_rope_head_dim", 16},
                 {"v_head_dim", 40},
                 {"torch_dtype", "bfloat16"}});
  return config;
}

Fp8Checkpoint mla_checkpoint(const Form& form) {
  Fp8Checkpoint checkpoint(form);
  checkpoint.add_norm("input_layernorm", kHidden);
  checkpoint.add_norm("self_attn.q_a_layernorm", 136);
  checkpoint.add_norm("self_attn.kv_a_layernorm", 144);
  checkpoint.add("q_a_proj", 136, kHidden, 0.06f);
  checkpoint.add("q_b_proj", 4 * 48, 136, 0.06f);
  checkpoint.add("kv_a_proj_with_mqa", 144 + 16, kHidden, 0.06f);
  checkpoint.add("kv_b_proj", 4 * (32 + 40), 144, 0.06f);
  checkpoint.add("o_proj", kHidden, 4 * 40, 0.06f);
  checkpoint.tensors["model.layers.0.self_attn.k_scale"] = floats({1}, 1, 2);
  return checkpoint;
}

json gqa_config() {
  return {{"model_type", "llama"},          {"hidden_size", kHidden}, {"num_attention_heads", 6},
          {"num_key_value_heads", 2},       {"head_dim", 32},         {"num_hidden_layers", 1},
          {"max_position_embeddings", 256}, {"rms_norm_eps", 1e-6},   {"vocab_size", 100},
          {"torch_dtype", "bfloat16"},      {"rope_theta", 10000}};
}

Fp8Checkpoint gqa_checkpoint(const Form& form) {
  Fp8Checkpoint checkpoint(form);
  checkpoint.add_norm("input_layernorm", kHidden);
  checkpoint.add("q_proj", 192, kHidden, 0.06f);
  checkpoint.add("k_proj", 64, kHidden, 0.06f);
  checkpoint.add("v_proj", 64, kHidden, 0.06f);
  checkpoint.add("o_proj", kHidden, 192, 0.06f);
  return checkpoint;
}

/// Hidden states of a sequence, their positions, and a layer's rows for them.
struct Sequence {
  explicit Sequence(DType dtype)
      : hidden(Tensor::empty(dtype, {kTokens, kHidden})),
        out(Tensor::empty(dtype, {kTokens, kHidden})) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      token_hidden_state(1, t, hidden.view().select(0, t));
      positions.push_back(t);
    }
  }
  template <class Layer>
  void run(const Model& model) {
    const Runtime runtime({.num_threads = 2});
    test::SequenceRunner runner(runtime, std::get<Layer>(model.layer(0).attention), kTokens);
    runner.run(hidden, out, std::vector<std::int64_t>{20, 1, 1, 2});
  }
  static constexpr std::int64_t kTokens = 24;
  Tensor hidden, out;
  std::vector<std::int64_t> positions;
};

std::vector<double> expected_mla(const Model& model, const Fp8Checkpoint& file,
                                 const Sequence& sequence) {
  oracle::MlaWeights weights = test::oracle_weights(model.config(), model.mla_weights(0));
  weights.q_a_proj = file.values.at("q_a_proj");
  weights.q_b_proj = file.values.at("q_b_proj");
  weights.kv_a_proj = file.values.at("kv_a_proj_with_mqa");
  weights.kv_b_proj = file.values.at("kv_b_proj");
  weights.o_proj = file.values.at("o_proj");
  const std::vector<double> x = test::to_doubles(sequence.hidden);
  return oracle::mla_layer(weights, x, sequence.positions,
                           oracle::mla_latent_rows(weights, x, sequence.positions),
                           oracle::MlaForm::expanded);
}

class Fp8Model : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(, Fp8Model, testing::ValuesIn(forms()),
                         [](const auto& form) { return std::string(form.param.name); });

TEST_P(Fp8Model, GroupsAreThoseOfTheForm) {  // F040
  json config = mla_config();
  config["quantization_config"] = GetParam().config;
  const WeightQuantization got = parse_model_config(config.dump(), "c.json").quantization;
  EXPECT_EQ(got.weights, GetParam().weights);
  EXPECT_EQ(got.activations, GetParam().activations);
}

TEST_P(Fp8Model, LatentLayersAgreeWithTheOracleOnTheFilesValues) {  // F046
  const Fp8Checkpoint file = mla_checkpoint(GetParam());
  const TempDir dir;
  file.write(dir, mla_config());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const MlaAbsorption absorption : {MlaAbsorption::two_step, MlaAbsorption::full}) {
      const Model model = Model::load(dir.path(), {.dtype = dtype, .absorption = absorption});
      EXPECT_EQ(model.config().dtype, DType::bf16);
      EXPECT_EQ(model.mla_weights(0).kv_b_proj.dtype, DType::f8e4m3fn);
      Sequence sequence(dtype);
      sequence.run<MlaLayer>(model);
      const auto expected = expected_mla(model, file, sequence);
      EXPECT_TRUE(test::rows_close(expected, sequence.out, tolerance(dtype))) << name_of(dtype);
    }
  }
}

TEST_P(Fp8Model, GroupedQueryLayersAgreeWithTheOracleOnTheFilesValues) {
  const Fp8Checkpoint file = gqa_checkpoint(GetParam());
  const TempDir dir;
  file.write(dir, gqa_config());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Model model = Model::load(dir.path(), {.dtype = dtype});
    const AttentionWeights& stored = model.gqa_weights(0);
    EXPECT_EQ(stored.q_proj.dtype, DType::f8e4m3fn);
    Sequence sequence(dtype);
    sequence.run<AttentionLayer>(model);
    oracle::GqaWeights weights =
        test::oracle_weights(model.config(), stored, model.config().groups[0]);
    weights.q_proj = file.values.at("q_proj");
    weights.k_proj = file.values.at("k_proj");
    weights.v_proj = file.values.at("v_proj");
    weights.o_proj = file.values.at("o_proj");
    const std::vector<double> x = test::to_doubles(sequence.hidden);
    const auto expected = oracle::gqa_layer(weights, x, sequence.positions,
                                            oracle::gqa_rows(weights, x, sequence.positions));
    EXPECT_TRUE(test::rows_close(expected, sequence.out, tolerance(dtype))) << name_of(dtype);
    const std::int64_t codes = (192 + 64 + 64) * kHidden + kHidden * 192;
    EXPECT_LT(model.weight_bytes(), codes + codes / 8);
  }
}

TEST_P(Fp8Model, VerificationDecodesTheFilesValues) {
  const Fp8Checkpoint file = mla_checkpoint(GetParam()), gqa_file = gqa_checkpoint(GetParam());
  const TempDir dir, gqa_dir;
  file.write(dir, mla_config());
  gqa_file.write(gqa_dir, gqa_config());
  const oracle::MlaWeights mla = engine::oracle_mla_weights(Model::load(dir.path(), {}), 0);
  EXPECT_EQ(mla.q_a_proj, file.values.at("q_a_proj"));
  EXPECT_EQ(mla.q_b_proj, file.values.at("q_b_proj"));
  EXPECT_EQ(mla.kv_a_proj, file.values.at("kv_a_proj_with_mqa"));
  EXPECT_EQ(mla.kv_b_proj, file.values.at("kv_b_proj"));
  EXPECT_EQ(mla.o_proj, file.values.at("o_proj"));
  const oracle::GqaWeights gqa = engine::oracle_gqa_weights(Model::load(gqa_dir.path(), {}), 0);
  EXPECT_EQ(gqa.q_proj, gqa_file.values.at("q_proj"));
  EXPECT_EQ(gqa.k_proj, gqa_file.values.at("k_proj"));
  EXPECT_EQ(gqa.v_proj, gqa_file.values.at("v_proj"));
  EXPECT_EQ(gqa.o_proj, gqa_file.values.at("o_proj"));
}

TEST(Fp8ModelFiles, AbsorbedWeightsMayBeRequantised) {
  const Fp8Checkpoint file = mla_checkpoint(forms()[0]);
  const TempDir dir;
  file.write(dir, mla_config());
  const Model exact =
      Model::load(dir.path(), {.dtype = DType::f32, .absorption = MlaAbsorption::full});
  const Model model = Model::load(
      dir.path(),
      {.dtype = DType::f32, .absorption = MlaAbsorption::full, .requantize_absorbed = true});
  EXPECT_LT(model.weight_bytes(), exact.weight_bytes());
  Sequence sequence(DType::f32);
  sequence.run<MlaLayer>(model);
  const auto expected = expected_mla(model, file, sequence);
  EXPECT_TRUE(test::rows_close(expected, sequence.out, {0x1p-4, 0}));
  EXPECT_FALSE(test::rows_close(expected, sequence.out, tolerance(DType::f32)));
}

TEST(Fp8ModelFiles, ProjectionsThatAreNotConvertedStayDense) {
  Fp8Checkpoint file = gqa_checkpoint(forms()[0]);
  const std::string name = "model.layers.0.self_attn.k_proj";
  file.tensors[name + ".weight"] = floats({64, kHidden}, -0.1f, 0.1f);
  const TempDir dir;
  file.write(dir, gqa_config());
  EXPECT_TRUE(mentions(error_of(ErrorCode::unsupported, [&] { Model::load(dir.path(), {}); }),
                       {"k_proj.weight_scale_inv", "the weight is not"}));
  file.tensors.erase(name + ".weight_scale_inv");
  file.write(dir, gqa_config());
  const Model model = Model::load(dir.path(), {});
  EXPECT_EQ(model.gqa_weights(0).k_proj.dtype, DType::bf16);
  EXPECT_EQ(model.gqa_weights(0).v_proj.dtype, DType::f8e4m3fn);
}

TEST(Fp8ModelFiles, WhatDoesNotFitIsNamed) {
  const std::string kv_b = "model.layers.0.self_attn.kv_b_proj.weight";
  const auto error = [&](const Form& form, ErrorCode code,
                         const std::function<void(FileTensors&)>& change) {
    Fp8Checkpoint file = mla_checkpoint(form);
    change(file.tensors);
    const TempDir dir;
    file.write(dir, mla_config());
    return error_of(code, [&] { Model::load(dir.path(), {}); });
  };
  const std::vector<Form> all = forms();
  for (const Form& form : all) {
    const std::string scale = kv_b + form.scale_suffix;
    EXPECT_TRUE(
        mentions(error(form, ErrorCode::corrupt_file, [&](FileTensors& t) { t.erase(scale); }),
                 {"model.safetensors", "kv_b_proj.weight_scale"}));
    EXPECT_TRUE(mentions(error(form, ErrorCode::corrupt_file,
                               [&](FileTensors& t) {
                                 t[scale] = floats({7, 7}, 1, 2);
                               }),
                         {"kv_b_proj.weight_scale", "[7, 7]"}));
    EXPECT_TRUE(mentions(
        error(form, ErrorCode::unsupported, [&](FileTensors& t) { t[scale].dtype = "I32"; }),
        {"kv_b_proj.weight_scale", "I32"}));
  }
  EXPECT_TRUE(mentions(
      error(all[0], ErrorCode::unsupported, [&](FileTensors& t) { t[kv_b].dtype = "F8_E5M2"; }),
      {"kv_b_proj.weight", "F8_E5M2"}));
  EXPECT_TRUE(mentions(error(all[0], ErrorCode::unsupported,
                             [&](FileTensors& t) {
                               t["model.layers.0.self_attn.kv_a_layernorm.weight"] = {
                                   "F8_E4M3", {144}, std::string(144, '\0')};
                             }),
                       {"kv_a_layernorm.weight", "F8_E4M3", "BF16"}));
}

TEST(Fp8ModelConfig, OtherMethodsFormatsAndStrategiesAreRefused) {  // F041
  const auto refused = [](const json& quantization, ErrorCode code = ErrorCode::unsupported) {
    json config = gqa_config();
    config["quantization_config"] = quantization;
    return error_of(code, [&] { parse_model_config(config.dump(), "c.json"); });
  };
  EXPECT_TRUE(mentions(refused({{"quant_method", "gptq"}}), {"quant_method", "gptq"}));
  EXPECT_TRUE(mentions(refused({{"fmt", "e4m3"}}, ErrorCode::corrupt_file), {"quant_method"}));
  EXPECT_TRUE(mentions(refused({{"quant_method", "fp8"}, {"fmt", "e5m2"}}), {"fmt", "e5m2"}));
  for (const json& block : {json{128}, json{128, 0}, json{128, 1.5}, json{128, "x"}}) {
    EXPECT_TRUE(mentions(
        refused({{"quant_method", "fp8"}, {"weight_block_size", block}}, ErrorCode::corrupt_file),
        {"weight_block_size"}));
  }
  for (const char* strategy : {"block", "group", "token"}) {
    EXPECT_TRUE(mentions(refused(compressed(strategy)), {"strategy", strategy, "channel"}));
  }
  const auto changed = [&](const char* key, const json& value) {
    json config = compressed("channel");
    config["config_groups"]["group_0"]["weights"][key] = value;
    return config;
  };
  EXPECT_TRUE(mentions(refused(changed("num_bits", 4)), {"group_0.weights", "num_bits 4"}));
  EXPECT_TRUE(mentions(refused(changed("type", "int")), {"'int'"}));
  EXPECT_TRUE(mentions(refused(changed("symmetric", false)), {"symmetric"}));
  json config = compressed("channel");
  config["format"] = "pack-quantized";
  EXPECT_TRUE(mentions(refused(config), {"format", "pack-quantized"}));
  config = compressed("channel");
  config["config_groups"]["group_1"] = compressed("tensor")["config_groups"]["group_0"];
  EXPECT_TRUE(mentions(refused(config), {"config_groups", "different strategies"}));
  config["config_groups"] = json::object();
  EXPECT_TRUE(mentions(refused(config, ErrorCode::corrupt_file), {"config_groups is empty"}));
}

}  // namespace
}  // namespace fovea
