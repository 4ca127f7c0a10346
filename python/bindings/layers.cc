#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <map>

#include "arguments.h"
#include "bindings.h"
#include "config.h"
#include "fovea/attention.h"
#include "fovea/mla.h"
#include "runtime.h"
#include "variant.h"

namespace fovea::python {
namespace {

/// Fields of a weights struct by name.
template <class Weights>
using Fields = std::map<std::string, TensorView Weights::*>;

const Fields<MlaWeights>& mla_fields() {
  static const Fields<MlaWeights> fields = {{"q_a_proj", &MlaWeights::q_a_proj},
                                            {"q_a_bias", &MlaWeights::q_a_bias},
                                            {"q_a_layernorm", &MlaWeights::q_a_layernorm},
                                            {"q_b_proj", &MlaWeights::q_b_proj},
                                            {"kv_a_proj", &MlaWeights::kv_a_proj},
                                            {"kv_a_bias", &MlaWeights::kv_a_bias},
                                            {"kv_a_layernorm", &MlaWeights::kv_a_layernorm},
                                            {"kv_b_proj", &MlaWeights::kv_b_proj},
                                            {"o_proj", &MlaWeights::o_proj},
                                            {"o_bias", &MlaWeights::o_bias},
                                            {"sinks", &MlaWeights::sinks}};
  return fields;
}

const Fields<AttentionWeights>& attention_fields() {
  static const Fields<AttentionWeights> fields = {{"qkv_proj", &AttentionWeights::qkv_proj},
                                                  {"qkv_bias", &AttentionWeights::qkv_bias},
                                                  {"q_proj", &AttentionWeights::q_proj},
                                                  {"q_bias", &AttentionWeights::q_bias},
                                                  {"k_proj", &AttentionWeights::k_proj},
                                                  {"k_bias", &AttentionWeights::k_bias},
                                                  {"v_proj", &AttentionWeights::v_proj},
                                                  {"v_bias", &AttentionWeights::v_bias},
                                                  {"q_norm", &AttentionWeights::q_norm},
                                                  {"k_norm", &AttentionWeights::k_norm},
                                                  {"o_proj", &AttentionWeights::o_proj},
                                                  {"o_bias", &AttentionWeights::o_bias},
                                                  {"sinks", &AttentionWeights::sinks}};
  return fields;
}

template <class Weights>
Weights read_weights(Arguments& arguments, nb::dict tensors, const Fields<Weights>& fields) {
  Weights weights;
  for (const auto& [key, value] : tensors) {
    const std::string name = nb::cast<std::string>(nb::str(key));
    const auto field = fields.find(name);
    if (field == fields.end()) {
      std::string names;
      for (const auto& [known, member] : fields) names += (names.empty() ? "" : ", ") + known;
      throw nb::value_error(
          ("weights has \"" + name + "\"; its names may be " + names).c_str());
    }
    weights.*(field->second) = arguments.read(value, field->first.c_str());
  }
  return weights;
}

AttentionStep step_of(Arguments& arguments, const BatchPlan& plan, nb::handle block_table,
                      nb::handle slot_mapping, nb::handle positions) {
  AttentionStep step;
  step.plan = &plan;
  step.block_table = arguments.block_table(block_table);
  if (!slot_mapping.is_none()) step.slot_mapping = arguments.slots(slot_mapping);
  step.positions = arguments.read_optional(positions, "positions");
  return step;
}

void make_mla_layer(MlaLayer* self, const MlaDims& dims, nb::dict weights, nb::object rotary,
                    const std::string& absorption, float rms_norm_eps,
                    const std::string& kv_b_order) {
  Arguments arguments;
  MlaWeights read = read_weights(arguments, weights, mla_fields());
  read.kv_b_order = choice<KvBOrder>(
      kv_b_order, "kv_b_order",
      {{"per_head", KvBOrder::per_head}, {"grouped", KvBOrder::grouped}});
  MlaOptions options;
  options.absorption = choice<MlaAbsorption>(
      absorption, "absorption",
      {{"two_step", MlaAbsorption::two_step}, {"full", MlaAbsorption::full}});
  options.rms_norm_eps = rms_norm_eps;
  new (self) MlaLayer(dims, read, rotary_of(rotary), options);
}

void run_mla_layer(const MlaLayer& layer, nb::handle runtime_object, nb::handle hidden,
                   nb::handle out, const BatchPlan& plan, nb::handle cache,
                   nb::handle block_table, nb::handle slot_mapping, nb::handle positions) {
  Arguments arguments(runtime_object);
  const TensorView in = arguments.read(hidden, "hidden");
  const TensorView result = arguments.write(out, "out");
  const PagedKvCache& rows = *arguments.cache(cache, "cache", Access::write);
  const AttentionStep step = step_of(arguments, plan, block_table, slot_mapping, positions);
  arguments.runtime().run([&](const OpContext& ctx) {
    ctx.workspace->reserve(layer.workspace_bytes(ctx, plan));
    layer(ctx, in, result, step, rows);
  });
}

void make_attention_layer(AttentionLayer* self, const GqaDims& dims, nb::dict weights,
                          nb::object rotary, const std::string& qk_norm, float rms_norm_eps) {
  Arguments arguments;
  AttentionOptions options;
  options.qk_norm = choice<QkNorm>(qk_norm, "qk_norm",
                                   {{"none", QkNorm::none},
                                    {"pre_rope", QkNorm::pre_rope},
                                    {"post_rope", QkNorm::post_rope}});
  options.rms_norm_eps = rms_norm_eps;
  new (self) AttentionLayer(dims, read_weights(arguments, weights, attention_fields()),
                            rotary_of(rotary), options);
}

void run_attention_layer(const AttentionLayer& layer, nb::handle runtime_object,
                         nb::handle hidden, nb::handle out, const BatchPlan& plan,
                         nb::handle k_cache, nb::handle v_cache, nb::handle block_table,
                         nb::handle slot_mapping, nb::handle positions) {
  Arguments arguments(runtime_object);
  const TensorView in = arguments.read(hidden, "hidden");
  const TensorView result = arguments.write(out, "out");
  const GqaCache cache{*arguments.cache(k_cache, "k_cache", Access::write),
                       *arguments.cache(v_cache, "v_cache", Access::write)};
  const AttentionStep step = step_of(arguments, plan, block_table, slot_mapping, positions);
  arguments.runtime().run([&](const OpContext& ctx) {
    ctx.workspace->reserve(layer.workspace_bytes(ctx, plan));
    layer(ctx, in, result, step, cache);
  });
}

}  // namespace

void bind_layers(nb::module_& m) {
  // fovea.layers has the calls that users make, with their documentation.
  nb::class_<MlaLayer>(m, "MlaLayer")
      .def("__init__", &make_mla_layer, nb::arg("dims"), nb::arg("weights"), nb::kw_only(),
           nb::arg("rotary") = nb::none(), nb::arg("absorption") = "two_step",
           nb::arg("rms_norm_eps") = 1e-6f, nb::arg("kv_b_order") = "per_head")
      .def_prop_ro("dims", [](const MlaLayer& l) { return l.dims(); })
      .def_prop_ro("dtype", [](const MlaLayer& l) { return std::string(name_of(l.dtype())); })
      .def_prop_ro("weight_bytes", &MlaLayer::weight_bytes);
  bind_call(m, "run_mla_layer", &run_mla_layer);
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def("__init__", &make_attention_layer, nb::arg("dims"), nb::arg("weights"), nb::kw_only(),
           nb::arg("rotary") = nb::none(), nb::arg("qk_norm") = "none",
           nb::arg("rms_norm_eps") = 1e-6f)
      .def_prop_ro("dims", [](const AttentionLayer& l) { return l.dims(); })
      .def_prop_ro("dtype",
                   [](const AttentionLayer& l) { return std::string(name_of(l.dtype())); })
      .def_prop_ro("weight_bytes", &AttentionLayer::weight_bytes);
  bind_call(m, "run_attention_layer", &run_attention_layer);
}

}  // namespace fovea::python
