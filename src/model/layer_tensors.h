// The weights of one decoder layer, before they are packed.
#pragma once

#include <vector>

#include "fovea/mla.h"
#include "fovea/thread_pool.h"

namespace fovea {

/// Views of somebody's memory, in whatever dtype and alignment it has.
struct LayerTensors {
  TensorView input_layernorm;  ///< [H]
  MlaWeights attention;
};

/// Calls fn(TensorView&) for each tensor that is there.
template <class Fn>
void for_each_tensor(LayerTensors& layer, Fn&& fn) {
  MlaWeights& w = layer.attention;
  for (TensorView* view :
       {&layer.input_layernorm, &w.q_a_proj, &w.q_a_bias, &w.q_a_layernorm, &w.q_b_proj,
        &w.kv_a_proj, &w.kv_a_bias, &w.kv_a_layernorm, &w.kv_b_proj, &w.o_proj, &w.o_bias}) {
    if (*view) fn(*view);
  }
}

/// Tensors of one dtype, aligned; `memory` holds those that are no mapping's.
struct LayerMemory {
  LayerTensors tensors;
  std::vector<Tensor> memory;
};

/// Keeps what already has `dtype` and its alignment where it is, and converts the rest, rounding to
/// nearest even.
LayerMemory convert_layer(const LayerTensors& layer, DType dtype, ThreadPool& pool);

}  // namespace fovea
