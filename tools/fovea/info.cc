// fovea info: what this machine has, and which implementation each op takes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "commands.h"
#include "fovea/error.h"
#include "fovea/kv_format.h"
#include "fovea/linear.h"
#include "fovea/model.h"
#include "machine_json.h"
#include "table.h"

namespace fovea::cli {
namespace {

struct InfoArgs {
  RuntimeArgs runtime;
  bool formats = false;
  std::string json_file;
};

nlohmann::ordered_json describe_ops(const Runtime& runtime, DType dtype) {
  nlohmann::ordered_json ops;
  for (const ImplementationChoice& choice : explain_implementations(runtime, dtype)) {
    auto& op = ops[choice.op];
    if (choice.reason.empty()) {
      op["takes"] = choice.implementation;
    } else {
      op["declined"].push_back(
          {{"implementation", choice.implementation}, {"reason", choice.reason}});
    }
  }
  return ops;
}

/// Of a product with weights of `dtype`.
std::string linear_backend(const Runtime& runtime, DType dtype) {
  try {
    const Tensor weight = Tensor::zeros(dtype, {64, 64});
    const Linear linear(weight, {}, LinearBackend::automatic, runtime.context().memory);
    return std::string(linear.backend_name());
  } catch (const Error& error) {
    return fmt::format("none: {}", error.what());
  }
}

nlohmann::ordered_json describe_mla(const MlaDims& dims, std::int64_t element_bytes) {
  const std::int64_t expanded = dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim);
  return {{"attention", "latent"},
          {"num_heads", dims.num_heads},
          {"q_lora_rank", dims.q_lora_rank},
          {"kv_lora_rank", dims.kv_lora_rank},
          {"qk_nope_head_dim", dims.qk_nope_head_dim},
          {"qk_rope_head_dim", dims.qk_rope_head_dim},
          {"v_head_dim", dims.v_head_dim},
          {"latent_bytes_per_token", dims.latent_dim() * element_bytes},
          {"expanded_bytes_per_token", expanded * element_bytes}};
}

nlohmann::ordered_json describe_gqa(const ModelConfig& config, std::int64_t element_bytes) {
  const GqaDims& dims = config.gqa;
  std::int64_t window = 0, windowed_layers = 0;
  for (const std::int32_t group : config.layer_group) {
    const AttentionVariant& variant = config.groups[static_cast<std::size_t>(group)].variant;
    if (variant.window_left < 0) continue;
    window = variant.window_left + 1;
    ++windowed_layers;
  }
  return {{"attention", "grouped-query"},
          {"num_heads", dims.num_heads},
          {"num_kv_heads", dims.num_kv_heads},
          {"head_dim", dims.head_dim},
          {"sliding_window", window},
          {"windowed_layers", windowed_layers},
          {"sinks", config.sinks},
          {"bytes_per_token", (dims.k_size() + dims.v_size()) * element_bytes}};
}

nlohmann::ordered_json describe_preset(const PresetInfo& preset) {
  const ModelConfig& config = preset.config;
  nlohmann::ordered_json json = {{"name", preset.name},
                                 {"layers", config.num_layers},
                                 {"hidden_size", config.hidden_size},
                                 {"dtype", name_of(config.dtype)}};
  const std::int64_t element_bytes = bytes_of(config.dtype, 1);
  json.update(config.is_mla() ? describe_mla(config.mla, element_bytes)
                              : describe_gqa(config, element_bytes));
  return json;
}

nlohmann::ordered_json describe(const Runtime& runtime) {
  nlohmann::ordered_json json = describe_machine(runtime);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::string name(name_of(dtype));
    json["ops"][name] = describe_ops(runtime, dtype);
    json["linear"][name] = linear_backend(runtime, dtype);
  }
  for (const PresetInfo& preset : model_presets()) {
    json["presets"].push_back(describe_preset(preset));
  }
  return json;
}

std::string text_of(const nlohmann::ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void print_machine(const nlohmann::ordered_json& json) {
  fmt::print("fovea {}\n\nmachine\n", text_of(json["version"]));
  Facts facts;
  for (const auto& [key, value] : json["machine"].items()) facts.add(key, text_of(value));
  fmt::print("{}", facts.to_text());
}

/// "mla_decode, rope (f16, bf16)": ops, with their dtypes where these are not all.
std::string list_ops(const std::map<std::string, std::vector<std::string>>& dtypes_of_op,
                     std::size_t num_dtypes) {
  std::vector<std::string> ops;
  for (const auto& [op, dtypes] : dtypes_of_op) {
    const bool is_all = dtypes.size() == num_dtypes;
    ops.push_back(is_all ? op : fmt::format("{} ({})", op, fmt::join(dtypes, ", ")));
  }
  return fmt::format("{}", fmt::join(ops, ", "));
}

void print_ops(const nlohmann::ordered_json& json) {
  std::vector<std::string> header = {"op"};
  std::map<std::string, std::vector<std::string>> takes;
  // (implementation, reason) to where it was declined for it.
  std::map<std::pair<std::string, std::string>, std::map<std::string, std::vector<std::string>>>
      declined;
  for (const auto& [dtype, ops] : json["ops"].items()) {
    header.push_back(dtype);
    for (const auto& [op, choice] : ops.items()) {
      takes[op].push_back(choice.contains("takes") ? text_of(choice["takes"]) : "none");
      if (!choice.contains("declined")) continue;
      for (const auto& no : choice["declined"]) {
        declined[{text_of(no["implementation"]), text_of(no["reason"])}][op].push_back(dtype);
      }
    }
    takes["linear"].push_back(text_of(json["linear"][dtype]));
  }
  const std::size_t num_dtypes = header.size() - 1;
  Table table(std::move(header));
  for (auto& [op, implementations] : takes) {
    implementations.insert(implementations.begin(), op);
    table.add(implementations);
  }
  fmt::print("\nimplementations\n{}\ndeclined\n", table.to_text());
  for (const auto& [key, where] : declined) {
    fmt::print("  {}: {}: {}\n", key.first, key.second, list_ops(where, num_dtypes));
  }
}

/// The presets of one kind of attention; `columns` are their keys.
Table preset_table(const nlohmann::ordered_json& json, const char* attention,
                   std::vector<std::string> header, const std::vector<const char*>& columns) {
  Table table(std::move(header));
  for (const auto& preset : json["presets"]) {
    if (preset["attention"] != attention) continue;
    std::vector<std::string> row;
    for (const char* key : columns) row.push_back(text_of(preset[key]));
    if (preset.contains("latent_bytes_per_token")) {
      row.push_back(format_number(preset["expanded_bytes_per_token"].get<double>() /
                                  preset["latent_bytes_per_token"].get<double>()));
    }
    table.add(std::move(row));
  }
  return table;
}

void print_presets(const nlohmann::ordered_json& json) {
  const Table latent =
      preset_table(json, "latent",
                   {"name", "layers", "hidden", "heads", "q_lora", "kv_lora", "nope", "rope", "v",
                    "latent", "expanded", "ratio"},
                   {"name", "layers", "hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank",
                    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_bytes_per_token",
                    "expanded_bytes_per_token"});
  fmt::print("\nlatent attention: bytes of a token's keys and values in one layer\n{}",
             latent.to_text());
  const Table grouped =
      preset_table(json, "grouped-query",
                   {"name", "layers", "hidden", "heads", "kv heads", "head_dim", "window",
                    "windowed", "sinks", "bytes"},
                   {"name", "layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
                    "sliding_window", "windowed_layers", "sinks", "bytes_per_token"});
  fmt::print("\ngrouped-query attention: bytes as above; the window of how many layers\n{}",
             grouped.to_text());
}

/// Bytes that a token takes in one layer; null where the format does not have the model's widths.
nlohmann::ordered_json bytes_per_token(const ModelConfig& config, std::string_view format) {
  try {
    if (config.is_mla()) {
      return latent_format(format, config.mla.kv_lora_rank, config.mla.qk_rope_head_dim)
          .row_bytes();
    }
    const GqaDims& d = config.gqa;
    return heads_format(format, d.num_kv_heads, d.head_dim).row_bytes() +
           heads_format(format, d.num_kv_heads, d.v_head_dim).row_bytes();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return nullptr;
  }
}

int info_formats(const JsonFile& json_file) {
  nlohmann::ordered_json json;
  std::vector<std::string> header = {"bytes per token and layer"};
  for (const std::string_view format : kv_format_names()) header.emplace_back(format);
  Table table(std::move(header));
  for (const PresetInfo& preset : model_presets()) {
    std::vector<std::string> row = {std::string(preset.name)};
    for (const std::string_view format : kv_format_names()) {
      const nlohmann::ordered_json bytes = bytes_per_token(preset.config, format);
      json[preset.name][format] = bytes;
      row.push_back(bytes.is_null() ? "-" : bytes.dump());
    }
    table.add(std::move(row));
  }
  fmt::print("{}", table.to_text());
  json_file.write(json);
  return 0;
}

int info(const InfoArgs& args) {
  const JsonFile json_file(args.json_file);
  if (args.formats) return info_formats(json_file);
  const ToolRuntime runtime(args.runtime);
  const nlohmann::ordered_json json = describe(*runtime);
  print_machine(json);
  print_ops(json);
  print_presets(json);
  json_file.write(json);
  return 0;
}

}  // namespace

Command declare_info(Options& options) {
  auto args = std::make_shared<InfoArgs>();
  add_runtime_options(options, args->runtime);
  options.flag("--formats", args->formats,
               "Only: bytes of a token in each KV format, for each preset");
  options.output_file("--json", args->json_file, "Write it to a file");
  return [args] { return info(*args); };
}

}  // namespace fovea::cli
