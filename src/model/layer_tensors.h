// The weights of one decoder layer, before they are packed.
#pragma once

#include <vector>

#include "fovea/attention.h"
#include "fovea/mla.h"
#include "fovea/thread_pool.h"

namespace fovea {

/// Views of somebody's memory, in whatever dtype and alignment it has.
struct LayerTensors {
  TensorView input_layernorm;           ///< [H]
  TensorView post_attention_layernorm;  ///< [H]; absent unless the model has one.
  MlaWeights mla;                       ///< Of a model with latent attention, ...
  AttentionWeights gqa;                 ///< ... or with grouped-query attention.
  KvScalePair kv_scales;                ///< Of a cache with one scale per tensor.
};

/// Calls fn(TensorView&) for each tensor that is there.
template <class Fn>
void for_each_tensor(LayerTensors& layer, Fn&& fn) {
  MlaWeights& m = layer.mla;
  AttentionWeights& g = layer.gqa;
  for (TensorView* view : {&layer.input_layernorm,
                           &layer.post_attention_layernorm,
                           &m.q_a_proj,
                           &m.q_a_bias,
                           &m.q_a_layernorm,
                           &m.q_b_proj,
                           &m.kv_a_proj,
                           &m.kv_a_bias,
                           &m.kv_a_layernorm,
                           &m.kv_b_proj,
                           &m.o_proj,
                           &m.o_bias,
                           &g.q_proj,
                           &g.q_bias,
                           &g.k_proj,
                           &g.k_bias,
                           &g.v_proj,
                           &g.v_bias,
                           &g.q_norm,
                           &g.k_norm,
                           &g.o_proj,
                           &g.o_bias,
                           &g.sinks}) {
    if (*view) fn(*view);
  }
}

/// Calls fn(TensorView&) for each scale that is there.
template <class Fn>
void for_each_scale(LayerTensors& layer, Fn&& fn) {
  MlaWeights& m = layer.mla;
  AttentionWeights& g = layer.gqa;
  for (WeightScale* scale :
       {&m.q_a_proj_scale, &m.q_b_proj_scale, &m.kv_a_proj_scale, &m.kv_b_proj_scale,
        &m.o_proj_scale, &g.q_proj_scale, &g.k_proj_scale, &g.v_proj_scale, &g.o_proj_scale}) {
    if (scale->scale) fn(scale->scale);
  }
}

/// Tensors of one dtype, aligned, and FP8 ones with their scales as stored; `memory` holds those
/// that are no mapping's.
struct LayerMemory {
  LayerTensors tensors;
  std::vector<Tensor> memory;
};

/// What becomes of stored norm weights.
enum class NormWeights {
  as_stored,
  plus_one,  ///< Stored as w - 1.
};

/// Keeps what already has `dtype` and its alignment where it is, as well as what is FP8, and
/// converts the rest, rounding to nearest even.
LayerMemory convert_layer(const LayerTensors& layer, DType dtype, NormWeights norms,
                          ThreadPool& pool);

}  // namespace fovea
