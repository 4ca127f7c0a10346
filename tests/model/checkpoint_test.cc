#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/checkpoint_files.h"
#include "model/layer_tensors.h"
#include "support/compare.h"

namespace fovea {
namespace {

using test::error_of;
using test::FileTensors;
using test::float_tensor;
using test::json;
using test::mentions;
using test::TempDir;
using test::tiny_tensors;

ModelConfig config_of(const json& config) { return parse_model_config(config.dump(), "c.json"); }
ModelConfig tiny() { return config_of(test::tiny_config()); }

const std::string kAttention = "model.layers.1.self_attn.";

/// Reads both layers of a directory with these tensors in one file.
void read_all(const FileTensors& tensors, const ModelConfig& config = tiny()) {
  const TempDir dir;
  dir.write("model.safetensors", test::safetensors_bytes(tensors));
  Checkpoint checkpoint(dir.path());
  read_layer(checkpoint, config, 0);
  read_layer(checkpoint, config, 1);
}

template <class Change>
std::string refused(ErrorCode code, Change&& change) {
  FileTensors tensors = tiny_tensors();
  change(tensors);
  return error_of(code, [&] { read_all(tensors); });
}

TEST(Checkpoint, LayersAreViewsOfTheFile) {
  const TempDir dir;
  dir.write("model.safetensors", test::safetensors_bytes(tiny_tensors()));
  Checkpoint checkpoint(dir.path());
  const LayerTensors layer = read_layer(checkpoint, tiny(), 1);
  EXPECT_EQ(layer.input_layernorm.shape[0], 16);
  EXPECT_EQ(*layer.input_layernorm.ptr<float>({1}), 1.25f);
  const MlaWeights& w = layer.mla;
  EXPECT_EQ(to_string(w.q_b_proj), to_string(TensorView::of<float>(nullptr, {12, 6})));
  EXPECT_EQ(to_string(w.kv_a_proj), to_string(TensorView::of<float>(nullptr, {10, 16})));
  EXPECT_EQ(to_string(w.kv_b_proj), to_string(TensorView::of<float>(nullptr, {14, 8})));
  EXPECT_EQ(to_string(w.o_proj), to_string(TensorView::of<float>(nullptr, {16, 6})));
  EXPECT_TRUE(w.q_a_proj && w.q_a_layernorm && w.kv_a_layernorm);
  EXPECT_FALSE(w.q_a_bias || w.kv_a_bias || w.o_bias);
  EXPECT_EQ(w.kv_b_order, KvBOrder::per_head);
}

// B116, B118, F046
TEST(Checkpoint, ScalesOfThePerTensorCacheAreRead) {
  const auto scales_of = [](const FileTensors& stored) {
    FileTensors tensors = tiny_tensors();
    for (const auto& [name, tensor] : stored) tensors[kAttention + name] = tensor;
    const TempDir dir;
    dir.write("model.safetensors", test::safetensors_bytes(tensors));
    Checkpoint checkpoint(dir.path());
    EXPECT_EQ(read_layer(checkpoint, tiny(), 0).kv_scales.k_scale, 1.f);
    EXPECT_EQ(read_layer(checkpoint, tiny(), 0).kv_scales.v_scale, 1.f);
    return read_layer(checkpoint, tiny(), 1).kv_scales;
  };
  KvScalePair scales =
      scales_of({{"k_scale", float_tensor({1}, 0.25f)}, {"v_scale", float_tensor({1}, 0.5f)}});
  EXPECT_EQ(scales.k_scale, 0.25f);
  EXPECT_EQ(scales.v_scale, 0.5f);
  EXPECT_THROW(latent_format("fp8_e4m3", 8, 2, scales), Error);  // B120
  scales = scales_of({{"k_proj.k_scale", float_tensor({1}, 0.125f)}});
  EXPECT_EQ(scales.k_scale, 0.125f);
  EXPECT_EQ(scales.v_scale, 1.f);
  scales = scales_of({{"kv_scale", float_tensor({1}, 0.0137f)}});
  EXPECT_EQ(scales.k_scale, 0.0137f);
  EXPECT_EQ(scales.v_scale, 0.0137f);
  // One for each head is not one for the tensor: only a cache that needs it refuses it.
  scales = scales_of({{"k_scale", float_tensor({2}, 1.f)}});
  EXPECT_TRUE(std::isnan(scales.k_scale));
  EXPECT_THROW(heads_format("fp8_e4m3", 2, 8, scales.k_scale), Error);
}

TEST(Checkpoint, UncompressedQueriesBiasesAndBareNamesAreRead) {
  json config = test::tiny_config();
  config["q_lora_rank"] = nullptr;
  config["attention_bias"] = true;
  FileTensors tensors;
  for (const auto& [name, tensor] : tiny_tensors()) {
    if (name.find(".q_") == std::string::npos) tensors[name.substr(name.find('.') + 1)] = tensor;
  }
  for (const char* layer : {"layers.0.self_attn.", "layers.1.self_attn."}) {
    const std::string prefix = layer;
    tensors[prefix + "q_proj.weight"] = float_tensor({12, 16});
    tensors[prefix + "kv_a_proj_with_mqa.bias"] = float_tensor({10});
    tensors[prefix + "o_proj.bias"] = float_tensor({16});
    tensors[prefix + "rotary_emb.inv_freq"] = float_tensor({1});
  }
  const TempDir dir;
  dir.write("model.safetensors", test::safetensors_bytes(tensors));
  Checkpoint checkpoint(dir.path());
  const LayerTensors layer = read_layer(checkpoint, config_of(config), 1);
  EXPECT_FALSE(layer.mla.q_a_proj || layer.mla.q_a_bias);
  EXPECT_EQ(layer.mla.q_b_proj.shape[1], 16);
  EXPECT_TRUE(layer.mla.kv_a_bias && layer.mla.o_bias);
}

TEST(Checkpoint, EveryMissingTensorIsNamed) {
  int num_checked = 0;
  for (const auto& [name, tensor] : tiny_tensors()) {
    if (name.find("mlp") != std::string::npos || name == "lm_head.weight") continue;
    EXPECT_TRUE(
        mentions(refused(ErrorCode::corrupt_file, [&, n = name](FileTensors& t) { t.erase(n); }),
                 {"model.safetensors", name.c_str()}));
    ++num_checked;
  }
  EXPECT_EQ(num_checked, 16);
}

// B217, F018
TEST(Checkpoint, EveryWrongShapeIsNamed) {
  for (const auto& [name, tensor] : tiny_tensors()) {
    if (name.find("mlp") != std::string::npos || name == "lm_head.weight") continue;
    const std::string text = refused(ErrorCode::corrupt_file, [&, n = name](FileTensors& t) {
      std::vector<std::int64_t> shape = t[n].shape;
      shape.back() += 1;
      t[n] = float_tensor(shape);
    });
    EXPECT_TRUE(mentions(text, {"model.safetensors", name.c_str(), "shape"}));
  }
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file,
                               [](FileTensors& t) {
                                 t[kAttention + "kv_b_proj.weight"] = float_tensor({8, 14});
                               }),
                       {"kv_b_proj.weight", "[8, 14]", "[14, 8]"}));
  EXPECT_TRUE(mentions(refused(ErrorCode::corrupt_file,
                               [](FileTensors& t) {
                                 t[kAttention + "o_proj.weight"] =
                                     float_tensor(std::vector<std::int64_t>(50, 1));
                               }),
                       {"o_proj.weight", "[1, 1, 1, 1, 1, 1, 1, 1, ...]"}));
}

// F035
TEST(Checkpoint, QuantisedWeightsAreRefusedWithTheReason) {
  auto replaced = [](const char* other) {
    return refused(ErrorCode::unsupported, [&](FileTensors& t) {
      t.erase(kAttention + "kv_b_proj.weight");
      t[kAttention + "kv_b_proj" + other] = {"I32", {2}, std::string(8, '\0')};
    });
  };
  for (const char* other : {".qweight", ".weight_packed", ".weight_scale_inv"}) {
    EXPECT_TRUE(mentions(replaced(other), {"kv_b_proj.weight", other, "quantised"}));
  }
  EXPECT_TRUE(mentions(
      refused(ErrorCode::unsupported,
              [](FileTensors& t) {
                t[kAttention + "kv_b_proj.weight"] = {"F8_E4M3", {14, 8}, std::string(112, '\0')};
                t[kAttention + "kv_b_proj.weight_scale_inv"] = float_tensor({1, 1});
              }),
      {"kv_b_proj.weight", "F8_E4M3", "quantization_config"}));
  EXPECT_TRUE(
      mentions(refused(ErrorCode::unsupported,
                       [](FileTensors& t) {
                         t[kAttention + "kv_b_proj.weight_scale_inv"] = float_tensor({1, 1});
                       }),
               {"kv_b_proj.weight_scale_inv", "quantised"}));
  EXPECT_TRUE(mentions(
      refused(ErrorCode::unsupported,
              [](FileTensors& t) {
                t[kAttention + "kv_b_proj.weight"] = {"F64", {14, 8}, std::string(896, '\0')};
              }),
      {"kv_b_proj.weight", "F64"}));
}

TEST(Checkpoint, TensorsThatWouldBeIgnoredAreRefused) {
  for (const char* name : {"q_a_proj.bias", "o_proj.bias", "q_norm.weight", "q_proj.weight",
                           "indexer.wk.weight", "kv_b_proj.bias"}) {
    EXPECT_TRUE(mentions(refused(ErrorCode::unsupported,
                                 [&](FileTensors& t) { t[kAttention + name] = float_tensor({1}); }),
                         {name, "no place"}));
  }
}

TEST(Checkpoint, ShardsAreOpenedAsTheIndexSays) {
  const TempDir dir;
  FileTensors parts[3];
  json map;
  int i = 0;
  for (const auto& [name, tensor] : tiny_tensors()) {
    const bool unused = name.find("mlp") != std::string::npos || name == "lm_head.weight";
    const int part = unused ? 2 : i++ % 2;
    parts[part][name] = tensor;
    map[name] = "part-" + std::to_string(part) + ".safetensors";
  }
  auto write_index = [&](const json& weights) {
    dir.write("model.safetensors.index.json",
              json{{"metadata", {{"total_size", 1}}}, {"weight_map", weights}}.dump());
  };
  auto read = [&] {
    Checkpoint checkpoint(dir.path());
    const LayerTensors layer = read_layer(checkpoint, tiny(), 0);
    EXPECT_EQ(*layer.mla.o_proj.ptr<float>({0, 1}), 0.25f);
    read_layer(checkpoint, tiny(), 1);
  };
  write_index(map);
  dir.write("part-0.safetensors", test::safetensors_bytes(parts[0]));
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, read),
                       {"part-1.safetensors", "cannot be opened"}));
  dir.write("part-1.safetensors", test::safetensors_bytes(parts[1]));
  read();  // The third holds nothing that attention looks at.

  json wrong = map;
  const std::string o_proj = kAttention + "o_proj.weight";
  wrong[o_proj] = map[o_proj] == "part-0.safetensors" ? "part-1.safetensors" : "part-0.safetensors";
  write_index(wrong);
  EXPECT_TRUE(mentions(
      error_of(ErrorCode::corrupt_file, read),
      {wrong[o_proj].get_ref<const std::string&>().c_str(), "o_proj.weight", "index.json"}));
  wrong.erase(o_proj);
  write_index(wrong);
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, read), {"index.json", "o_proj.weight"}));

  dir.write("part-1.safetensors", test::safetensors_bytes(parts[1]).substr(0, 2000));
  write_index(map);
  EXPECT_TRUE(
      mentions(error_of(ErrorCode::corrupt_file, read), {"part-1.safetensors", "truncated"}));
}

TEST(Checkpoint, DirectoriesWithoutWeightsAreRefused) {
  const TempDir dir;
  auto open = [&] { Checkpoint checkpoint(dir.path()); };
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, open),
                       {dir.path().c_str(), "neither model.safetensors nor"}));
  dir.write("model.safetensors", "");
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, open), {"model.safetensors", "is empty"}));
  std::filesystem::remove(dir.path() + "/model.safetensors");
  std::filesystem::create_directory(dir.path() + "/model.safetensors");
  EXPECT_TRUE(mentions(error_of(ErrorCode::corrupt_file, open), {"model.safetensors", "regular"}));
}

TEST(ConvertLayer, KeepsWhatFitsAndConvertsTheRest) {
  const TempDir dir;
  FileTensors tensors = tiny_tensors();
  const std::string name = "model.layers.0.self_attn.kv_b_proj.weight";
  test::FileTensor half{"BF16", {14, 8}, {}};
  for (int i = 0; i < 14 * 8; ++i) {
    const BFloat16 value = from_float<BFloat16>(static_cast<float>(i));
    half.bytes.push_back(static_cast<char>(value.bits & 0xff));
    half.bytes.push_back(static_cast<char>(value.bits >> 8));
  }
  tensors[name] = half;
  dir.write("model.safetensors", test::safetensors_bytes(tensors));
  Checkpoint checkpoint(dir.path());
  const LayerTensors layer = read_layer(checkpoint, tiny(), 0);
  const auto pool = make_std_thread_pool(2);

  const LayerMemory same = convert_layer(layer, DType::f32, NormWeights::as_stored, *pool);
  EXPECT_EQ(same.memory.size(), 1u);
  EXPECT_EQ(same.tensors.mla.o_proj.data, layer.mla.o_proj.data);
  EXPECT_NE(same.tensors.mla.kv_b_proj.data, layer.mla.kv_b_proj.data);
  EXPECT_EQ(*same.tensors.mla.kv_b_proj.ptr<float>({13, 7}), 111.f);

  const LayerMemory halves = convert_layer(layer, DType::bf16, NormWeights::as_stored, *pool);
  EXPECT_EQ(halves.memory.size(), 7u);
  EXPECT_EQ(halves.tensors.mla.kv_b_proj.data, layer.mla.kv_b_proj.data);
  EXPECT_EQ(to_float(*halves.tensors.mla.o_proj.ptr<BFloat16>({0, 1})), 0.25f);
}

TEST(ConvertLayer, MovesTensorsThatLieAtOddAddresses) {
  const TempDir dir;
  const auto [header, data] = test::safetensors_parts(tiny_tensors());
  std::string text = header.dump();
  while (text.size() % 4 != 1) text += ' ';
  dir.write("model.safetensors", test::safetensors_bytes(text, data));
  Checkpoint checkpoint(dir.path());
  const LayerTensors layer = read_layer(checkpoint, tiny(), 1);
  const auto pool = make_std_thread_pool(1);
  const LayerMemory moved = convert_layer(layer, DType::f32, NormWeights::as_stored, *pool);
  EXPECT_EQ(moved.memory.size(), 8u);
  EXPECT_EQ(*moved.tensors.input_layernorm.ptr<float>({1}), 1.25f);
  const LayerMemory halves = convert_layer(layer, DType::f16, NormWeights::as_stored, *pool);
  EXPECT_EQ(halves.memory.size(), 8u);
  EXPECT_EQ(to_float(*halves.tensors.input_layernorm.ptr<Float16>({1})), 1.25f);
}

}  // namespace
}  // namespace fovea
