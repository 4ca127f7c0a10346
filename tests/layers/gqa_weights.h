// Seeded weights of an attention layer, and the same rounded values for the oracle, once per
// adapter.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fovea/attention.h"
#include "fovea/oracle.h"
#include "layers/fp8_projection.h"
#include "support/poison.h"

namespace fovea::test {

struct GqaShape {
  GqaDims dims = {
      .hidden_size = 40, .num_heads = 6, .num_kv_heads = 2, .head_dim = 16, .v_head_dim = 16};
  bool fused_weights = false;
  bool biases = false;
  QkNorm qk_norm = QkNorm::none;
  bool norm_whole_width = false;
  bool sinks = false;
  std::optional<WeightGroups> fp8 = {};  ///< Projections are FP8 in these groups, ...
  bool dense_v = false;                  ///< ... but for v_proj.
  int adapters = 0;  ///< Even ones are fused, odd ones have q, k or v; all have o but the last.
};

class GqaLayerWeights {
 public:
  GqaLayerWeights(const GqaShape& shape, DType dtype, std::uint64_t seed)
      : dims_(shape.dims.validated()), dtype_(dtype), seed_(seed), twins_(1) {
    const std::int64_t D = dims_.head_dim, H = dims_.hidden_size;
    oracle::GqaWeights& twin = twins_[0];
    twin.hidden_size = H;
    twin.num_heads = dims_.num_heads;
    twin.num_kv_heads = dims_.num_kv_heads;
    twin.head_dim = D;
    twin.v_head_dim = dims_.v_head_dim;
    twin.sm_scale = dims_.sm_scale;
    twin.rms_norm_eps = 1e-6;
    twin.norm_after_rope = shape.qk_norm == QkNorm::post_rope;
    // Logits have a standard deviation of about 2: near-uniform weights would hide mistakes.
    make_projections(shape, shape.qk_norm == QkNorm::none ? 2 : 1);
    if (shape.qk_norm != QkNorm::none) {
      views_.q_norm =
          add(make({shape.norm_whole_width ? dims_.q_size() : D}, 0.6, 1.4), twin.q_norm);
      views_.k_norm =
          add(make({shape.norm_whole_width ? dims_.k_size() : D}, 0.6, 1.4), twin.k_norm);
    }
    views_.o_proj = add(matrix(H, dims_.out_size(), 1), twin.o_proj);
    if (shape.biases) views_.o_bias = add(make({H}, 0.3, 0), twin.o_bias);
    if (shape.sinks) views_.sinks = add(make({dims_.num_heads}, 1, 1), twin.sinks);
    if (shape.fp8) quantize(shape);
    for (int a = 0; a < shape.adapters; ++a) make_adapter(a, a + 1 < shape.adapters);
  }

  const AttentionWeights& views() const { return views_; }
  /// Of rows with adapter `id`, -1: without one.
  const oracle::GqaWeights& twin(int id) const { return twins_[static_cast<std::size_t>(id + 1)]; }
  std::vector<oracle::GqaWeights>& twins() { return twins_; }

 private:
  void make_projections(const GqaShape& shape, double gain) {
    const std::int64_t H = dims_.hidden_size, q = dims_.q_size(), k = dims_.k_size(),
                       v = dims_.v_size();
    oracle::GqaWeights& twin = twins_[0];
    Tensor qkv = Tensor::empty(dtype_, {q + k + v, H}), bias = Tensor::empty(dtype_, {q + k + v});
    const TensorView parts[] = {qkv.view().slice(0, 0, q), qkv.view().slice(0, q, q + k),
                                qkv.view().slice(0, q + k, q + k + v)};
    const TensorView offsets[] = {bias.view().slice(0, 0, q), bias.view().slice(0, q, q + k),
                                  bias.view().slice(0, q + k, q + k + v)};
    for (int i = 0; i < 3; ++i) {
      fill(parts[i], (i == 0 ? gain : 1) / std::sqrt(static_cast<double>(H)), 0);
      fill(offsets[i], 0.3, 0);
    }
    twin.q_proj = to_doubles(parts[0]);
    twin.k_proj = to_doubles(parts[1]);
    twin.v_proj = to_doubles(parts[2]);
    if (shape.biases) {
      twin.q_bias = to_doubles(offsets[0]);
      twin.v_bias = to_doubles(offsets[2]);
      // Separate projections need not all have a bias.
      if (shape.fused_weights) twin.k_bias = to_doubles(offsets[1]);
    }
    if (shape.fused_weights) {
      views_.qkv_proj = qkv;
      if (shape.biases) views_.qkv_bias = bias;
    } else {
      views_.q_proj = parts[0];
      views_.k_proj = parts[1];
      views_.v_proj = parts[2];
      if (shape.biases) {
        views_.q_bias = offsets[0];
        views_.v_bias = offsets[2];
      }
    }
    tensors_.push_back(std::move(qkv));
    tensors_.push_back(std::move(bias));
  }

  void quantize(const GqaShape& shape) {
    oracle::GqaWeights& twin = twins_[0];
    const auto replace = [&](TensorView& projection, WeightScale& scale) {
      return fp8_.quantize(*shape.fp8, projection, scale);
    };
    if (shape.fused_weights) {
      const std::vector<double> all = replace(views_.qkv_proj, views_.qkv_proj_scale);
      auto next = all.begin();
      for (std::vector<double>* part : {&twin.q_proj, &twin.k_proj, &twin.v_proj}) {
        const auto end = next + static_cast<std::ptrdiff_t>(part->size());
        part->assign(next, end);
        next = end;
      }
    } else {
      twin.q_proj = replace(views_.q_proj, views_.q_proj_scale);
      twin.k_proj = replace(views_.k_proj, views_.k_proj_scale);
      if (!shape.dense_v) twin.v_proj = replace(views_.v_proj, views_.v_proj_scale);
    }
    twin.o_proj = replace(views_.o_proj, views_.o_proj_scale);
  }

  /// Merged into a twin of its own: W + scale B A.
  void make_adapter(int index, bool has_o) {
    const std::int64_t H = dims_.hidden_size, q = dims_.q_size(), k = dims_.k_size(),
                       v = dims_.v_size(), rank = 1 + 3 * index;
    const auto scale = static_cast<float>(0.5 + index);
    const auto update = [&](std::int64_t in, std::int64_t out) {
      std::vector<double> unused;
      return LoraWeights{.a = add(matrix(rank, in, 1), unused),
                         .b = add(matrix(out, rank, 0.4 / scale), unused),
                         .scale = scale};
    };
    AttentionLora lora;
    oracle::GqaWeights twin = twins_[0];
    if (index % 2 == 0) {
      lora.qkv = update(H, q + k + v);
      merge(twin.q_proj, lora.qkv, 0);
      merge(twin.k_proj, lora.qkv, q);
      merge(twin.v_proj, lora.qkv, q + k);
    } else {
      lora.q = update(H, q);
      merge(twin.q_proj, lora.q, 0);
      LoraWeights& other = index % 4 == 1 ? lora.v : lora.k;
      other = update(H, index % 4 == 1 ? v : k);
      merge(index % 4 == 1 ? twin.v_proj : twin.k_proj, other, 0);
    }
    if (has_o) {
      lora.o = update(dims_.out_size(), H);
      merge(twin.o_proj, lora.o, 0);
    }
    views_.lora.push_back(lora);
    twins_.push_back(std::move(twin));
  }
  static void merge(std::vector<double>& weight, const LoraWeights& lora, std::int64_t first_row) {
    const std::vector<double> a = to_doubles(lora.a), b = to_doubles(lora.b);
    const auto rank = static_cast<std::size_t>(lora.a.shape[0]);
    const auto in = static_cast<std::size_t>(lora.a.shape[1]);
    for (std::size_t row = 0; row < weight.size() / in; ++row) {
      for (std::size_t r = 0; r < rank; ++r) {
        const double factor =
            double{lora.scale} * b[(row + static_cast<std::size_t>(first_row)) * rank + r];
        for (std::size_t i = 0; i < in; ++i) weight[row * in + i] += factor * a[r * in + i];
      }
    }
  }

  Tensor matrix(std::int64_t out, std::int64_t in, double gain) {
    return make({out, in}, gain / std::sqrt(static_cast<double>(in)), 0);
  }
  Tensor make(std::initializer_list<std::int64_t> shape, double stddev, double mean) {
    Tensor tensor = Tensor::empty(dtype_, shape);
    fill(tensor, stddev, mean);
    return tensor;
  }
  void fill(const TensorView& view, double stddev, double mean) {
    fill_uniform(view, seed_ + 100 * stream_++, mean - stddev * std::sqrt(3.0),
                 mean + stddev * std::sqrt(3.0));
  }
  TensorView add(Tensor tensor, std::vector<double>& oracle_values) {
    oracle_values = to_doubles(tensor);
    tensors_.push_back(std::move(tensor));
    return tensors_.back();
  }

  GqaDims dims_;
  DType dtype_;
  std::uint64_t seed_;
  std::uint64_t stream_ = 0;
  std::vector<Tensor> tensors_;
  AttentionWeights views_;
  std::vector<oracle::GqaWeights> twins_;
  Fp8Projections fp8_;
};

}  // namespace fovea::test
