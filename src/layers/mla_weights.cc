#include "layers/mla_weights.h"

#include "core/check.h"
#include "layers/rows.h"

namespace fovea {
namespace {

void check_requantisable(const MlaProjections& p) {
  for (const Projection* projection : {&p.q_b, &p.kv_b, &p.o}) {
    FOVEA_CHECK(projection->is_quantized(), invalid_argument,
                "requantize_absorbed is on, but {} is {}, and must be f8e4m3fn", projection->name,
                name_of(projection->weight.dtype));
    const WeightGroups &groups = projection->scale.groups, &first = p.q_b.scale.groups;
    FOVEA_CHECK(groups == first, invalid_argument,
                "requantize_absorbed is on, but {} has groups of [{}, {}], and must have [{}, {}] "
                "like {}",
                projection->name, groups.out, groups.in, first.out, first.in, p.q_b.name);
  }
}

}  // namespace

MlaProjections::MlaProjections(const MlaWeights& w)
    : q_a{"q_a_proj", w.q_a_proj, w.q_a_proj_scale},
      q_b{"q_b_proj", w.q_b_proj, w.q_b_proj_scale},
      kv_a{"kv_a_proj", w.kv_a_proj, w.kv_a_proj_scale},
      kv_b{"kv_b_proj", w.kv_b_proj, w.kv_b_proj_scale},
      o{"o_proj", w.o_proj, w.o_proj_scale} {}

DType weights_dtype(const MlaWeights& w, const MlaOptions& options) {
  if (options.dtype) return *options.dtype;
  return w.kv_a_proj.dtype == DType::f8e4m3fn ? w.kv_a_layernorm.dtype : w.kv_a_proj.dtype;
}

void check_weights(const MlaDims& d, const MlaWeights& w, DType dtype, const MlaOptions& options) {
  FOVEA_CHECK(options.dtype || w.kv_a_proj.dtype == DType::f8e4m3fn || is_compute_dtype(dtype),
              invalid_argument, "kv_a_proj is {}, but must be f32, f16, bf16 or f8e4m3fn",
              to_string(w.kv_a_proj));
  FOVEA_CHECK(is_compute_dtype(dtype), invalid_argument,
              "dtype is {}, but must be f32, f16 or bf16", name_of(dtype));
  const std::int64_t N = d.num_heads, Lq = d.q_lora_rank, H = d.hidden_size;
  const MlaProjections p(w);
  const auto check_optional = [&](const char* name, const TensorView& view, std::int64_t extent) {
    if (view) check_shape(name, view, dtype, {extent});
  };
  if (Lq > 0) {
    check_projection(p.q_a, dtype, Lq, H);
    check_any_dtype("q_a_layernorm", w.q_a_layernorm, {Lq});
    check_optional("q_a_bias", w.q_a_bias, Lq);
  } else {
    FOVEA_CHECK(!w.q_a_proj && !w.q_a_proj_scale.scale && !w.q_a_bias && !w.q_a_layernorm,
                invalid_argument,
                "q_a_proj, its scale, q_a_bias or q_a_layernorm is there, but must not be: "
                "q_lora_rank is 0");
  }
  check_projection(p.q_b, dtype, N * d.qk_head_dim(), Lq > 0 ? Lq : H);
  check_projection(p.kv_a, dtype, d.latent_dim(), H);
  check_optional("kv_a_bias", w.kv_a_bias, d.latent_dim());
  check_any_dtype("kv_a_layernorm", w.kv_a_layernorm, {d.kv_lora_rank});
  mla_up_projections(d, w.kv_b_proj, w.kv_b_order);
  check_projection(p.kv_b, dtype, N * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank);
  check_projection(p.o, dtype, H, N * d.v_head_dim);
  check_optional("o_bias", w.o_bias, H);
  if (w.sinks) check_any_dtype("sinks", w.sinks, {N});
  if (!options.requantize_absorbed) return;
  FOVEA_CHECK(options.absorption == MlaAbsorption::full, invalid_argument,
              "requantize_absorbed is on, but absorption is two_step, and must be full");
  check_requantisable(p);
}

FusedA::FusedA(const MlaDims& d, const MlaWeights& w, DType dtype) {
  const MlaProjections p(w);
  const std::int64_t Lq = d.q_lora_rank, columns = Lq + d.latent_dim();
  const Projection parts[] = {p.q_a, p.kv_a};
  weight = fuse(std::span(parts).subspan(Lq > 0 ? 0 : 1), dtype);
  if (!w.q_a_bias && !w.kv_a_bias) return;
  bias = Tensor::zeros(dtype, {columns});
  if (w.q_a_bias) copy(w.q_a_bias, bias.view().slice(0, 0, Lq));
  if (w.kv_a_bias) copy(w.kv_a_bias, bias.view().slice(0, Lq, columns));
}

}  // namespace fovea
