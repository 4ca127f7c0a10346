// Checkpoints with FP8 projections as they are published: what is read, what their layers compute,
// and what is refused.
#include <gtest/gtest.h>

#include <functional>

#include "engine/oracle_weights.h"
#include "fovea/model.h"
#include "model/fp8_checkpoint.h"
#include "model/oracle_weights.h"
#include "support/compare.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

using test::compressed_tensors_config;
using test::error_of;
using test::FileTensors;
using test::fp8_forms;
using test::fp8_gqa_checkpoint;
using test::fp8_gqa_config;
using test::fp8_mla_checkpoint;
using test::fp8_mla_config;
using test::Fp8Checkpoint;
using test::Fp8Form;
using test::json;
using test::mentions;
using test::random_floats;
using test::TempDir;

constexpr std::int64_t kHidden = Fp8Checkpoint::kHidden;

/// f32: sums of some hundred terms, of which softmax makes factors.
test::RowTolerance tolerance(DType dtype) {
  return test::row_tolerance(dtype, dtype == DType::f32 ? 64 : 16);
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

class Fp8Model : public testing::TestWithParam<Fp8Form> {};
INSTANTIATE_TEST_SUITE_P(, Fp8Model, testing::ValuesIn(fp8_forms()),
                         [](const auto& form) { return std::string(form.param.name); });

TEST_P(Fp8Model, GroupsAreThoseOfTheForm) {  // F040
  json config = fp8_mla_config();
  config["quantization_config"] = GetParam().config;
  const WeightQuantization got = parse_model_config(config.dump(), "c.json").quantization;
  EXPECT_EQ(got.weights, GetParam().weights);
  EXPECT_EQ(got.activations, GetParam().activations);
}

TEST_P(Fp8Model, LatentLayersAgreeWithTheOracleOnTheFilesValues) {  // F046
  const Fp8Checkpoint file = fp8_mla_checkpoint(GetParam());
  const TempDir dir;
  file.write(dir, fp8_mla_config());
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
  const Fp8Checkpoint file = fp8_gqa_checkpoint(GetParam());
  const TempDir dir;
  file.write(dir, fp8_gqa_config());
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

/// Each code times its scale in float32, rounded once.
TEST_P(Fp8Model, TheIdentityGivesTheFilesValues) {  // F036, F359, B220
  const Fp8Checkpoint file = fp8_mla_checkpoint(GetParam());
  const TempDir dir;
  file.write(dir, fp8_mla_config());
  const Model model = Model::load(dir.path(), {});
  const MlaWeights& w = model.mla_weights(0);
  const struct {
    const char* name;
    const TensorView& codes;
    const WeightScale& scale;
  } projections[] = {{"q_a_proj", w.q_a_proj, w.q_a_proj_scale},
                     {"q_b_proj", w.q_b_proj, w.q_b_proj_scale},
                     {"kv_a_proj_with_mqa", w.kv_a_proj, w.kv_a_proj_scale},
                     {"kv_b_proj", w.kv_b_proj, w.kv_b_proj_scale},
                     {"o_proj", w.o_proj, w.o_proj_scale}};
  const std::unique_ptr<ThreadPool> pool = make_std_thread_pool(2);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto& [name, codes, scale] : projections) {
      const QuantizedWeight weight{codes, scale.scale, scale.groups};
      const std::int64_t out_features = codes.shape[0], in_features = codes.shape[1];
      const Tensor expected = Tensor::empty(dtype, {in_features, out_features});
      const std::vector<double>& exact = file.values.at(name);
      const std::vector<float> products(exact.begin(), exact.end());
      copy(TensorView::of(products.data(), {out_features, in_features}).transpose(0, 1), expected);
      const Tensor direct = dequantize_weight(weight, dtype);
      EXPECT_EQ(test::to_doubles(expected), test::to_doubles(direct.view().transpose(0, 1)));

      const Linear linear(weight, {}, dtype);
      const Tensor identity = Tensor::zeros(dtype, {in_features, in_features});
      for (std::int64_t i = 0; i < in_features; ++i) {
        test::assign(identity.view().slice(0, i, i + 1).slice(1, i, i + 1), std::vector{1.});
      }
      const Tensor out = Tensor::empty(dtype, {in_features, out_features});
      Workspace workspace;
      workspace.reserve(linear.workspace_bytes(in_features));
      linear({pool.get(), &workspace}, identity, out);
      EXPECT_EQ(test::to_doubles(expected), test::to_doubles(out)) << name << name_of(dtype);
    }
  }
}

TEST_P(Fp8Model, VerificationDecodesTheFilesValues) {
  const Fp8Checkpoint file = fp8_mla_checkpoint(GetParam());
  const Fp8Checkpoint gqa_file = fp8_gqa_checkpoint(GetParam());
  const TempDir dir, gqa_dir;
  file.write(dir, fp8_mla_config());
  gqa_file.write(gqa_dir, fp8_gqa_config());
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
  const Fp8Checkpoint file = fp8_mla_checkpoint(fp8_forms()[0]);
  const TempDir dir;
  file.write(dir, fp8_mla_config());
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

TEST(Fp8ModelFiles, DecodeMayRoundItsQueriesAndAbsorbedWeights) {
  const Fp8Checkpoint file = fp8_mla_checkpoint(fp8_forms()[0]);
  const TempDir dir;
  file.write(dir, fp8_mla_config());
  const Model exact = Model::load(dir.path(), {.dtype = DType::f32});
  for (const Model::Options& options :
       {Model::Options{.dtype = DType::f32, .q_scale = 0.05f},
        Model::Options{.dtype = DType::f32, .absorbed_products = AbsorbedProducts::fp8}}) {
    const Model model = Model::load(dir.path(), options);
    EXPECT_EQ(options.q_scale > 0, model.weight_bytes() == exact.weight_bytes());
    Sequence sequence(DType::f32);
    sequence.run<MlaLayer>(model);
    const auto expected = expected_mla(model, file, sequence);
    EXPECT_TRUE(test::rows_close(expected, sequence.out, {0x1p-3, 0}));
    EXPECT_FALSE(test::rows_close(expected, sequence.out, tolerance(DType::f32)));
  }
}

TEST(Fp8ModelFiles, ProjectionsThatAreNotConvertedStayDense) {
  Fp8Checkpoint file = fp8_gqa_checkpoint(fp8_forms()[0]);
  const std::string name = "model.layers.0.self_attn.k_proj";
  file.tensors[name + ".weight"] = random_floats({64, kHidden}, -0.1f, 0.1f);
  const TempDir dir;
  file.write(dir, fp8_gqa_config());
  EXPECT_TRUE(mentions(error_of(ErrorCode::unsupported, [&] { Model::load(dir.path(), {}); }),
                       {"k_proj.weight_scale_inv", "the weight is not"}));
  file.tensors.erase(name + ".weight_scale_inv");
  file.write(dir, fp8_gqa_config());
  const Model model = Model::load(dir.path(), {});
  EXPECT_EQ(model.gqa_weights(0).k_proj.dtype, DType::bf16);
  EXPECT_EQ(model.gqa_weights(0).v_proj.dtype, DType::f8e4m3fn);
}

TEST(Fp8ModelFiles, WhatDoesNotFitIsNamed) {
  const std::string kv_b = "model.layers.0.self_attn.kv_b_proj.weight";
  const auto error = [&](const Fp8Form& form, ErrorCode code,
                         const std::function<void(FileTensors&)>& change) {
    Fp8Checkpoint file = fp8_mla_checkpoint(form);
    change(file.tensors);
    const TempDir dir;
    file.write(dir, fp8_mla_config());
    return error_of(code, [&] { Model::load(dir.path(), {}); });
  };
  const std::vector<Fp8Form> all = fp8_forms();
  for (const Fp8Form& form : all) {
    const std::string scale = kv_b + form.scale_suffix;
    EXPECT_TRUE(
        mentions(error(form, ErrorCode::corrupt_file, [&](FileTensors& t) { t.erase(scale); }),
                 {"model.safetensors", "kv_b_proj.weight_scale"}));
    EXPECT_TRUE(mentions(error(form, ErrorCode::corrupt_file,
                               [&](FileTensors& t) {
                                 t[scale] = random_floats({7, 7}, 1, 2);
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
    json config = fp8_gqa_config();
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
  for (const char* strategy : {"group", "tensor_group", "token"}) {
    EXPECT_TRUE(mentions(refused(compressed_tensors_config(strategy)),
                         {"strategy", strategy, "block"}));
  }
  const auto changed = [&](const char* key, const json& value) {
    json config = compressed_tensors_config("channel");
    config["config_groups"]["group_0"]["weights"][key] = value;
    return config;
  };
  EXPECT_TRUE(mentions(refused(changed("num_bits", 4)), {"group_0.weights", "num_bits 4"}));
  EXPECT_TRUE(mentions(refused(changed("type", "int")), {"'int'"}));
  EXPECT_TRUE(mentions(refused(changed("symmetric", false)), {"symmetric"}));
  json config = compressed_tensors_config("channel");
  config["format"] = "pack-quantized";
  EXPECT_TRUE(mentions(refused(config), {"format", "pack-quantized"}));
  config = compressed_tensors_config("channel");
  config["config_groups"]["group_1"] =
      compressed_tensors_config("tensor")["config_groups"]["group_0"];
  EXPECT_TRUE(mentions(refused(config), {"config_groups", "different strategies"}));
  config["config_groups"] = json::object();
  EXPECT_TRUE(mentions(refused(config, ErrorCode::corrupt_file), {"config_groups is empty"}));
  EXPECT_TRUE(mentions(refused(compressed_tensors_config("block"), ErrorCode::corrupt_file),
                       {"block_structure"}));
}

}  // namespace
}  // namespace fovea
