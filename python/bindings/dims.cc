#include <nanobind/stl/string.h>

#include "bindings.h"
#include "config.h"
#include "fovea/attention.h"
#include "fovea/error.h"
#include "fovea/mla.h"

namespace fovea::python {
namespace {

void make_mla(MlaDims* self, std::int64_t hidden_size, std::int64_t num_heads,
              std::int64_t kv_lora_rank, std::int64_t qk_nope_head_dim,
              std::int64_t qk_rope_head_dim, std::int64_t v_head_dim, std::int64_t q_lora_rank,
              float sm_scale) {
  new (self) MlaDims(MlaDims{hidden_size, num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim,
                             qk_rope_head_dim, v_head_dim, sm_scale}
                         .validated());
}

MlaDims mla_from_config(nb::object config) {
  const ModelConfig model = read_config(config);
  if (!model.is_mla()) {
    throw Error(ErrorCode::invalid_argument,
                "config is of a " + model.model_type +
                    ", which has grouped-query attention: use GqaDims.from_config");
  }
  return model.mla.validated();
}

void make_gqa(GqaDims* self, std::int64_t hidden_size, std::int64_t num_heads,
              std::int64_t num_kv_heads, std::int64_t head_dim, std::int64_t v_head_dim,
              float sm_scale) {
  GqaDims dims;
  dims.hidden_size = hidden_size;
  dims.num_heads = num_heads;
  dims.num_kv_heads = num_kv_heads;
  dims.head_dim = head_dim;
  dims.v_head_dim = v_head_dim;
  dims.sm_scale = sm_scale;
  new (self) GqaDims(dims.validated());
}

GqaDims gqa_from_config(nb::object config) {
  const ModelConfig model = read_config(config);
  if (model.is_mla()) {
    throw Error(ErrorCode::invalid_argument,
                "config is of a " + model.model_type +
                    ", which has latent attention: use MlaDims.from_config");
  }
  return model.gqa.validated();
}

}  // namespace

void bind_dims(nb::module_& m) {
  nb::class_<MlaDims>(m, "MlaDims", R"(Head counts and ranks of a layer with latent attention.

Args:
    hidden_size, num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: as in
        the model's config.
    q_lora_rank: 0: queries come straight from the hidden states.
    sm_scale: the one softmax scale, YaRN's mscale squared included. 0 takes
        (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.

Raises:
    ValueError: names the field that is out of range.)")
      .def("__init__", &make_mla, nb::kw_only(), nb::arg("hidden_size"), nb::arg("num_heads"),
           nb::arg("kv_lora_rank"), nb::arg("qk_nope_head_dim"), nb::arg("qk_rope_head_dim"),
           nb::arg("v_head_dim"), nb::arg("q_lora_rank") = 0, nb::arg("sm_scale") = 0.f)
      .def_static("from_config", &mla_from_config, nb::arg("config"),
                  R"(Dims of a model of Hugging Face.

Args:
    config: a transformers config, its dict, or the path of config.json or its folder.

Raises:
    ValueError: names the field that is missing or malformed.
    NotImplementedError: what would change attention and is not implemented.)")
      .def_ro("hidden_size", &MlaDims::hidden_size)
      .def_ro("num_heads", &MlaDims::num_heads)
      .def_ro("q_lora_rank", &MlaDims::q_lora_rank)
      .def_ro("kv_lora_rank", &MlaDims::kv_lora_rank)
      .def_ro("qk_nope_head_dim", &MlaDims::qk_nope_head_dim)
      .def_ro("qk_rope_head_dim", &MlaDims::qk_rope_head_dim)
      .def_ro("v_head_dim", &MlaDims::v_head_dim)
      .def_ro("sm_scale", &MlaDims::sm_scale)
      .def_prop_ro("latent_dim", &MlaDims::latent_dim, "kv_lora_rank + qk_rope_head_dim.");

  nb::class_<GqaDims>(m, "GqaDims", R"(Head counts and widths of a layer with grouped queries.

Args:
    hidden_size, num_heads: as in the model's config.
    num_kv_heads: divides num_heads; 0 takes num_heads.
    head_dim: of queries and keys; 0 takes hidden_size / num_heads.
    v_head_dim: 0 takes head_dim.
    sm_scale: 0 takes head_dim ** -0.5.

Raises:
    ValueError: names the field that is out of range.)")
      .def("__init__", &make_gqa, nb::kw_only(), nb::arg("hidden_size"), nb::arg("num_heads"),
           nb::arg("num_kv_heads") = 0, nb::arg("head_dim") = 0, nb::arg("v_head_dim") = 0,
           nb::arg("sm_scale") = 0.f)
      .def_static("from_config", &gqa_from_config, nb::arg("config"),
                  "Dims of a model of Hugging Face; see MlaDims.from_config.")
      .def_ro("hidden_size", &GqaDims::hidden_size)
      .def_ro("num_heads", &GqaDims::num_heads)
      .def_ro("num_kv_heads", &GqaDims::num_kv_heads)
      .def_ro("head_dim", &GqaDims::head_dim)
      .def_ro("v_head_dim", &GqaDims::v_head_dim)
      .def_ro("sm_scale", &GqaDims::sm_scale);
}

}  // namespace fovea::python
