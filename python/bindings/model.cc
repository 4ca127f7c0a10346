#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "bindings.h"
#include "config.h"
#include "fovea/error.h"

namespace fovea::python {
namespace {

const KvGroupConfig& group_of(const ModelConfig& config, std::int64_t layer) {
  if (layer < 0 || layer >= config.num_layers) {
    throw Error(ErrorCode::invalid_argument, "layer is " + std::to_string(layer) +
                                                 "; it must be in [0, " +
                                                 std::to_string(config.num_layers) + ")");
  }
  const auto group = config.layer_group[static_cast<std::size_t>(layer)];
  return config.groups[static_cast<std::size_t>(group)];
}

nb::dict variant_dict(const AttentionVariant& variant) {
  nb::dict result;
  result["causal"] = variant.causal;
  result["window_left"] = variant.window_left;
  result["attention_chunk"] = variant.attention_chunk;
  result["soft_cap"] = variant.soft_cap;
  return result;
}

std::shared_ptr<const RotaryEmbedding> make_rotary(std::int64_t dim, double theta,
                                                   std::int64_t max_position,
                                                   const std::string& pairing) {
  RopeConfig config;
  config.dim = dim;
  config.theta = theta;
  config.max_position = max_position;
  config.pairing = choice<RopePairing>(
      pairing, "pairing",
      {{"interleaved", RopePairing::interleaved}, {"neox", RopePairing::neox}});
  return std::make_shared<const RotaryEmbedding>(config);
}

std::shared_ptr<const RotaryEmbedding> rotary_from_config(nb::object config, std::int64_t layer,
                                                          std::int64_t max_position) {
  RopeConfig rope = group_of(read_config(config), layer).rope;
  if (max_position > 0) rope.max_position = max_position;
  return std::make_shared<const RotaryEmbedding>(rope);
}

Model load_model(const std::string& name_or_directory, std::int64_t num_layers,
                 const std::string& dtype, std::uint64_t seed, std::int64_t max_position,
                 const std::string& absorption) {
  Model::Options options;
  options.num_layers = num_layers;
  options.dtype = parse_dtype(dtype);
  options.seed = seed;
  options.max_position = max_position;
  options.absorption = choice<MlaAbsorption>(
      absorption, "absorption",
      {{"two_step", MlaAbsorption::two_step}, {"full", MlaAbsorption::full}});
  const nb::gil_scoped_release release;
  return Model::load(name_or_directory, options);
}

}  // namespace

std::shared_ptr<const RotaryEmbedding> rotary_of(nb::handle object) {
  if (object.is_none()) return nullptr;
  std::shared_ptr<RotaryEmbedding> rotary;
  if (!nb::try_cast(object, rotary, false)) {
    throw nb::type_error(
        ("rotary is a " + name_of_type(object) + "; it must be a fovea.RotaryEmbedding or None")
            .c_str());
  }
  return rotary;
}

void bind_model(nb::module_& m) {
  nb::class_<RotaryEmbedding>(m, "RotaryEmbedding", "The cos/sin table of every position.")
      .def_static("make", &make_rotary, nb::arg("dim"), nb::kw_only(), nb::arg("theta") = 10000.0,
                  nb::arg("max_position"), nb::arg("pairing") = "interleaved",
                  R"(Without scaling of positions.

Args:
    dim: channels that turn, even.
    theta: the base of the frequencies.
    max_position: rows of the table.
    pairing: "interleaved" (channel 2i with 2i + 1) or "neox" (i with i + dim / 2).)")
      .def_static("from_config", &rotary_from_config, nb::arg("config"), nb::arg("layer") = 0,
                  nb::kw_only(), nb::arg("max_position") = 0,
                  "Of a layer of a model of Hugging Face, with its scaling; see "
                  "MlaDims.from_config. max_position 0 takes the config's.")
      .def_prop_ro("dim", [](const RotaryEmbedding& r) { return r.config().dim; })
      .def_prop_ro("max_position",
                   [](const RotaryEmbedding& r) { return r.config().max_position; });

  nb::class_<ModelConfig>(m, "ModelConfig", "What attention needs to know of a config.json.")
      .def_static("read", [](nb::object config) { return read_config(config); },
                  nb::arg("config"), "See MlaDims.from_config.")
      .def_ro("model_type", &ModelConfig::model_type)
      .def_ro("num_layers", &ModelConfig::num_layers)
      .def_ro("hidden_size", &ModelConfig::hidden_size)
      .def_ro("max_position", &ModelConfig::max_position)
      .def_ro("latent_norm_eps", &ModelConfig::latent_norm_eps)
      .def_prop_ro("is_mla", &ModelConfig::is_mla)
      .def("variant",
           [](const ModelConfig& c, std::int64_t layer) {
             return variant_dict(group_of(c, layer).variant);
           },
           nb::arg("layer"), "causal, window_left, attention_chunk and soft_cap of a layer.");

  nb::class_<Model>(m, "Model", "A model's attention layers, immutable and shared freely.")
      .def_static("load", &load_model, nb::arg("name_or_directory"), nb::kw_only(),
                  nb::arg("num_layers") = -1, nb::arg("dtype") = "bf16", nb::arg("seed") = 0,
                  nb::arg("max_position") = 0, nb::arg("absorption") = "two_step",
                  R"(A preset with seeded weights, or a folder of Hugging Face.

Args:
    name_or_directory: "deepseek-v2-lite" and so on, or a folder with config.json and safetensors.
    num_layers: the first so many; -1: all of a checkpoint, 1 of a preset.
    dtype: "bf16", "f16" or "f32": what layers compute in.
    seed: of a preset's weights.
    max_position: positions that will be served; 0: the config's.
    absorption: of latent attention: "two_step" or "full".

Raises:
    ValueError: names the file and the tensor or field.
    NotImplementedError: what is not implemented.)")
      .def_prop_ro("config", [](const Model& model) { return model.config(); })
      .def_prop_ro("num_layers", &Model::num_layers)
      .def_prop_ro("weight_bytes", &Model::weight_bytes);
}

}  // namespace fovea::python
