// Dimensions and seeded weights of a test layer, and the same values for the oracle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/mla.h"
#include "fovea/oracle.h"
#include "layers/fp8_projection.h"
#include "support/poison.h"

namespace fovea::test {

struct LayerShape {
  std::int64_t heads = 4;
  std::int64_t q_lora = 0;
  std::int64_t latent = 32;
  std::int64_t nope = 16;
  std::int64_t rope = 8;
  std::int64_t value = 16;
  std::int64_t hidden = 48;
  bool biases = false;
  bool sinks = false;
  std::optional<WeightGroups> fp8 = {};  ///< Projections are FP8 in these groups, ...
  std::vector<std::string> dense = {};   ///< ... but for these. Heads of kv_b_proj come in order.

  MlaDims dims() const {
    return MlaDims{.hidden_size = hidden,
                   .num_heads = heads,
                   .q_lora_rank = q_lora,
                   .kv_lora_rank = latent,
                   .qk_nope_head_dim = nope,
                   .qk_rope_head_dim = rope,
                   .v_head_dim = value,
                   .sm_scale = 0.f}
        .validated();
  }
};

/// Weights in a dtype, and the same rounded values for the oracle. Logits have a standard deviation
/// of about 2: near-uniform weights would hide mistakes.
class LayerWeights {
 public:
  LayerWeights(const LayerShape& shape, DType dtype, std::uint64_t seed,
               KvBOrder order = KvBOrder::per_head)
      : shape_(shape), dtype_(dtype), seed_(seed) {
    const std::int64_t N = shape.heads, Lq = shape.q_lora, L = shape.latent, P = shape.nope,
                       R = shape.rope, V = shape.value, H = shape.hidden;
    oracle_.hidden_size = H;
    oracle_.num_heads = N;
    oracle_.q_lora_rank = Lq;
    oracle_.kv_lora_rank = L;
    oracle_.qk_nope_head_dim = P;
    oracle_.qk_rope_head_dim = R;
    oracle_.v_head_dim = V;
    oracle_.sm_scale = shape.dims().sm_scale;
    oracle_.rms_norm_eps = 1e-6;
    oracle_.rotary = oracle::rotary(R, 10000, true);
    const auto matrix = [&](std::int64_t out, std::int64_t in, double gain) {
      return make({out, in}, gain / std::sqrt(static_cast<double>(in)), 0);
    };
    const auto bias = [&](std::int64_t n) { return make({n}, 0.3, 0); };
    if (Lq > 0) {
      views_.q_a_proj = add(matrix(Lq, H, 1), oracle_.q_a_proj);
      views_.q_a_layernorm = add(make({Lq}, 0.2, 1), oracle_.q_a_layernorm);
      if (shape.biases) views_.q_a_bias = add(bias(Lq), oracle_.q_a_bias);
    }
    views_.q_b_proj = add(matrix(N * (P + R), Lq > 0 ? Lq : H, 2), oracle_.q_b_proj);
    views_.kv_a_proj = add(matrix(L + R, H, 1), oracle_.kv_a_proj);
    views_.kv_a_layernorm = add(make({L}, 0.2, 1), oracle_.kv_a_layernorm);
    Tensor kv_b = matrix(N * (P + V), L, 1);
    views_.o_proj = add(matrix(H, N * V, 1), oracle_.o_proj);
    if (shape.biases) {
      views_.kv_a_bias = add(bias(L + R), oracle_.kv_a_bias);
      views_.o_bias = add(bias(H), oracle_.o_bias);
    }
    if (shape.sinks) views_.sinks = add(make({N}, 1, 1), sinks_);
    oracle_.kv_b_proj = to_doubles(kv_b);
    if (order == KvBOrder::grouped) kv_b = grouped(kv_b);
    views_.kv_b_proj = kv_b;
    views_.kv_b_order = order;
    tensors_.push_back(std::move(kv_b));
    if (shape.fp8) quantize();
  }

  const MlaWeights& views() const { return views_; }
  const oracle::MlaWeights& oracle() const { return oracle_; }
  oracle::MlaWeights& oracle() { return oracle_; }
  void take_values_of(const LayerWeights& other) {
    oracle_ = other.oracle_;
    sinks_ = other.sinks_;
  }
  /// [N] or empty.
  const std::vector<double>& sinks() const { return sinks_; }

 private:
  Tensor make(std::initializer_list<std::int64_t> shape, double stddev, double mean) {
    Tensor tensor = Tensor::empty(dtype_, shape);
    std::vector<double> values(static_cast<std::size_t>(tensor.view().numel()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Uniform: real dims have millions of weights.
      values[i] = mean + stddev * std::sqrt(3.0) * (2 * random_unit(seed_ + 100 * stream_, i) - 1);
    }
    ++stream_;
    assign(tensor, values);
    return tensor;
  }
  TensorView add(Tensor tensor, std::vector<double>& oracle_values) {
    oracle_values = to_doubles(tensor);
    tensors_.push_back(std::move(tensor));
    return tensors_.back();
  }
  void quantize() {
    const auto replace = [&](const char* name, TensorView& projection, WeightScale& scale,
                             std::vector<double>& twin) {
      const auto& dense = shape_.dense;
      if (!projection || std::find(dense.begin(), dense.end(), name) != dense.end()) return;
      twin = fp8_.quantize(*shape_.fp8, projection, scale);
    };
    replace("q_a_proj", views_.q_a_proj, views_.q_a_proj_scale, oracle_.q_a_proj);
    replace("q_b_proj", views_.q_b_proj, views_.q_b_proj_scale, oracle_.q_b_proj);
    replace("kv_a_proj", views_.kv_a_proj, views_.kv_a_proj_scale, oracle_.kv_a_proj);
    replace("kv_b_proj", views_.kv_b_proj, views_.kv_b_proj_scale, oracle_.kv_b_proj);
    replace("o_proj", views_.o_proj, views_.o_proj_scale, oracle_.o_proj);
  }
  /// All heads' keys, then all heads' values.
  Tensor grouped(const Tensor& per_head) const {
    const std::int64_t N = shape_.heads, P = shape_.nope, V = shape_.value;
    Tensor result = Tensor::empty(dtype_, {N * (P + V), shape_.latent});
    for (std::int64_t n = 0; n < N; ++n) {
      copy(per_head.view().slice(0, n * (P + V), n * (P + V) + P),
           result.view().slice(0, n * P, (n + 1) * P));
      copy(per_head.view().slice(0, n * (P + V) + P, (n + 1) * (P + V)),
           result.view().slice(0, N * P + n * V, N * P + (n + 1) * V));
    }
    return result;
  }

  LayerShape shape_;
  DType dtype_;
  std::uint64_t seed_;
  std::uint64_t stream_ = 0;
  std::vector<Tensor> tensors_;
  MlaWeights views_;
  oracle::MlaWeights oracle_;
  std::vector<double> sinks_;
  Fp8Projections fp8_;
};

}  // namespace fovea::test
