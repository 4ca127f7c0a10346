#include "model/quantization.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "model/json_events.h"

namespace fovea {

namespace {

/// The one value that a field may have, where it is there.
void require_text(const ConfigFields& fields, const char* key, const char* only) {
  if (!fields.has(key)) return;
  const std::string value = fields.text(key);
  FOVEA_CHECK(value == only, unsupported, "{}: field {} is {}, but must be {}", fields.file(),
              fields.name_of(key), printable(value), only);
}

/// The field `key` is [out, in].
WeightGroups parse_block(const ConfigFields& fields, const char* key) {
  const std::vector<double> block = fields.numbers(key, 2, 1);
  for (const double extent : block) {
    FOVEA_CHECK(extent == std::floor(extent) && extent <= static_cast<double>(kMaxDim),
                corrupt_file, "{}: field {} holds {}, but must hold integers in [1, {}]",
                fields.file(), fields.name_of(key), extent, kMaxDim);
  }
  return {static_cast<std::int64_t>(block[0]), static_cast<std::int64_t>(block[1])};
}

WeightQuantization parse_fp8(const ConfigFields& fields) {
  constexpr const char* kBlock = "weight_block_size";
  require_text(fields, "fmt", "e4m3");
  WeightQuantization result{.method = WeightQuantMethod::fp8, .weights = {}, .activations = {}};
  if (!fields.has(kBlock)) return result;
  result.weights = parse_block(fields, kBlock);
  result.activations = {1, result.weights.in};
  return result;
}

WeightQuantization parse_compressed_group(const ConfigFields& group) {
  const ConfigFields weights = group.child("weights");
  const std::int64_t bits = weights.integer("num_bits", 1, 64);
  const std::string type = weights.text("type");
  FOVEA_CHECK(bits == 8 && type == "float", unsupported,
              "{}: field {} has num_bits {} and type {}, but must have 8 and float", group.file(),
              group.name_of("weights"), bits, printable(type));
  FOVEA_CHECK(weights.boolean_or("symmetric", true), unsupported,
              "{}: field {} is false, but must be true", group.file(),
              weights.name_of("symmetric"));
  const std::string strategy = weights.text("strategy");
  WeightQuantization result{
      .method = WeightQuantMethod::compressed_tensors, .weights = {}, .activations = {1, 0}};
  if (strategy == "block") {
    result.weights = parse_block(weights, "block_structure");
    result.activations.in = result.weights.in;
    return result;
  }
  FOVEA_CHECK(strategy == "tensor" || strategy == "channel", unsupported,
              "{}: field {} is {}, but must be tensor, channel or block", group.file(),
              weights.name_of("strategy"), printable(strategy));
  if (strategy == "channel") result.weights.out = 1;
  return result;
}

WeightQuantization parse_compressed_tensors(const ConfigFields& fields) {
  require_text(fields, "format", "float-quantized");
  const ConfigFields groups = fields.child("config_groups");
  std::optional<WeightQuantization> result;
  for (const std::string& name : groups.keys()) {
    const WeightQuantization group = parse_compressed_group(groups.child(name.c_str()));
    FOVEA_CHECK(!result || result->weights == group.weights, unsupported,
                "{}: field {} has groups of different strategies, but all must have one",
                fields.file(), fields.name_of("config_groups"));
    result = group;
  }
  FOVEA_CHECK(result, corrupt_file, "{}: field {} is empty", fields.file(),
              fields.name_of("config_groups"));
  return *result;
}

}  // namespace

WeightQuantization parse_weight_quantization(const ConfigFields& fields) {
  const std::string method = fields.text("quant_method");
  if (method == "fp8") return parse_fp8(fields);
  if (method == "compressed-tensors") return parse_compressed_tensors(fields);
  fail(ErrorCode::unsupported,
       "{}: field {} is {}, but must be fp8 or compressed-tensors; convert the checkpoint to bf16",
       fields.file(), fields.name_of("quant_method"), printable(method));
}

}  // namespace fovea
