#include "layers/attention_weights.h"

#include "core/check.h"
#include "layers/rows.h"

namespace fovea {
namespace {

/// The three parts of the fused product.
struct Part {
  Projection proj;
  const char* bias_name;
  const TensorView& bias;
  std::int64_t rows;
};

void check_norms(const GqaDims& d, const AttentionWeights& w, QkNorm qk_norm) {
  if (qk_norm == QkNorm::none) {
    FOVEA_CHECK(!w.q_norm && !w.k_norm, invalid_argument,
                "q_norm or k_norm is there, but must not be: qk_norm is none");
    return;
  }
  const bool per_head = w.q_norm.ndim == 1 && w.q_norm.shape[0] == d.head_dim;
  if (per_head) {
    check_any_dtype("k_norm", w.k_norm, {d.head_dim});
    return check_any_dtype("q_norm", w.q_norm, {d.head_dim});
  }
  FOVEA_CHECK(w.q_norm && w.q_norm.ndim == 1 && w.q_norm.shape[0] == d.q_size() &&
                  is_compute_dtype(w.q_norm.dtype),
              invalid_argument,
              "q_norm is {}, but must be [{}], of each head, or [{}], over all heads at once",
              w.q_norm ? to_string(w.q_norm) : "absent", d.head_dim, d.q_size());
  check_any_dtype("k_norm", w.k_norm, {d.k_size()});
}

}  // namespace

DType weights_dtype(const AttentionWeights& w, const AttentionOptions& options) {
  if (options.dtype) return *options.dtype;
  const TensorView& first = w.qkv_proj ? w.qkv_proj : w.q_proj;
  for (const TensorView* proj : {&first, &w.k_proj, &w.v_proj, &w.o_proj}) {
    if (*proj && proj->dtype != DType::f8e4m3fn) return proj->dtype;
  }
  return first.dtype;
}

Projection output_projection(const AttentionWeights& w) {
  return {"o_proj", w.o_proj, w.o_proj_scale};
}

void check_weights(const GqaDims& d, const AttentionWeights& w, DType dtype,
                   const AttentionOptions& options) {
  const std::int64_t H = d.hidden_size;
  const Part parts[] = {{{"q_proj", w.q_proj, w.q_proj_scale}, "q_bias", w.q_bias, d.q_size()},
                        {{"k_proj", w.k_proj, w.k_proj_scale}, "k_bias", w.k_bias, d.k_size()},
                        {{"v_proj", w.v_proj, w.v_proj_scale}, "v_bias", w.v_bias, d.v_size()}};
  FOVEA_CHECK(w.qkv_proj || w.q_proj, invalid_argument,
              "qkv_proj and q_proj are absent, but one of them must be there");
  FOVEA_CHECK(
      dtype != DType::f8e4m3fn || options.dtype, invalid_argument,
      "options.dtype is absent, but must be f32, f16 or bf16: all projections are f8e4m3fn");
  FOVEA_CHECK(
      is_compute_dtype(dtype), invalid_argument, "{} is {}, but must be f32, f16, bf16 or f8e4m3fn",
      options.dtype ? "options.dtype" : (w.qkv_proj ? "qkv_proj" : "q_proj"), name_of(dtype));
  if (w.qkv_proj) {
    check_projection({"qkv_proj", w.qkv_proj, w.qkv_proj_scale}, dtype, d.qkv_size(), H);
    if (w.qkv_bias) check_shape("qkv_bias", w.qkv_bias, dtype, {d.qkv_size()});
  } else {
    FOVEA_CHECK(!w.qkv_bias && !w.qkv_proj_scale.scale, invalid_argument,
                "qkv_bias is there, or qkv_proj_scale, but must not be: it belongs to qkv_proj");
  }
  for (const Part& part : parts) {
    if (w.qkv_proj) {
      FOVEA_CHECK(!part.proj.weight && !part.bias && !part.proj.scale.scale, invalid_argument,
                  "{} or {} is there, or {}_scale, but must not be: qkv_proj is", part.proj.name,
                  part.bias_name, part.proj.name);
      continue;
    }
    check_projection(part.proj, dtype, part.rows, H);
    if (part.bias) check_shape(part.bias_name, part.bias, dtype, {part.rows});
  }
  check_norms(d, w, options.qk_norm);
  check_projection(output_projection(w), dtype, H, d.out_size());
  if (w.o_bias) check_shape("o_bias", w.o_bias, dtype, {H});
  if (w.sinks) check_any_dtype("sinks", w.sinks, {d.num_heads});
}

FusedQkv::FusedQkv(const GqaDims& d, const AttentionWeights& w, DType dtype) {
  const std::int64_t keys = d.q_size(), values = keys + d.k_size(), end = d.qkv_size();
  if (w.qkv_proj) {
    const Projection whole[] = {{"qkv_proj", w.qkv_proj, w.qkv_proj_scale}};
    weight = fuse(whole, dtype);
  } else {
    const Projection parts[] = {{"q_proj", w.q_proj, w.q_proj_scale},
                                {"k_proj", w.k_proj, w.k_proj_scale},
                                {"v_proj", w.v_proj, w.v_proj_scale}};
    weight = fuse(parts, dtype);
  }
  if (!w.qkv_bias && !w.q_bias && !w.k_bias && !w.v_bias) return;
  bias = Tensor::zeros(dtype, {end});
  if (w.qkv_bias) copy(w.qkv_bias, bias);
  if (w.q_bias) copy(w.q_bias, bias.view().slice(0, 0, keys));
  if (w.k_bias) copy(w.k_bias, bias.view().slice(0, keys, values));
  if (w.v_bias) copy(w.v_bias, bias.view().slice(0, values, end));
}

AttentionLoraUpdates::AttentionLoraUpdates(const GqaDims& d,
                                           const std::vector<AttentionLora>& adapters)
    : qkv(adapters.size()), o(adapters.size()) {
  const auto is_there = [](const LoraWeights& weights) { return weights.a || weights.b; };
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const AttentionLora& adapter = adapters[i];
    const std::int64_t keys = d.q_size(), values = keys + d.k_size();
    const LoraUpdate updates[] = {{"qkv", adapter.qkv, 0, d.qkv_size()},
                                  {"q", adapter.q, 0, d.q_size()},
                                  {"k", adapter.k, keys, d.k_size()},
                                  {"v", adapter.v, values, d.v_size()}};
    for (const LoraUpdate& update : updates) {
      if (is_there(update.weights)) qkv[i].push_back(update);
    }
    FOVEA_CHECK(!is_there(adapter.qkv) || qkv[i].size() == 1, invalid_argument,
                "lora[{}] has qkv and {}, but must have one form: qkv, or any of q, k and v", i,
                qkv[i].back().name);
    if (is_there(adapter.o)) o[i].push_back({"o", adapter.o, 0, d.hidden_size});
  }
}

}  // namespace fovea
