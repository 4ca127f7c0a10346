// Weights from a seed, for presets and goldens: every value is a stateless integer hash of what and
// where it is, so that any part can be made alone, on any number of threads, and repeated by a
// script. tests/golden/seeded_weights.py is that script; the two agree bit for bit.
//
// A stream is (domain, seed, major, minor); its key folds the four words through splitmix64's
// mixer:
//   key = 0; for each word: key = mix((key ^ word) + G)        G = 0x9e3779b97f4a7c15
// Element i of a stream is h = mix(key + (i + 1) G), all modulo 2^64. The four 16-bit parts of h
// sum to a value of mean 2 * 65535 that is close to normal (it ends at 3.5 standard deviations);
// the difference to the mean is a small integer, exact in float32, and is scaled by one float32
// product:
//   x = float(sum - 131070) * float(std / sqrt((65536^2 - 1) / 3))
// Weights are domain 1, major = layer, minor = the tensor; hidden states domain 2, major = token
// id.
#pragma once

#include <cstdint>

#include "fovea/model.h"
#include "model/layer_tensors.h"

namespace fovea {

/// Weights of one layer whose attention looks like a trained model's instead of a uniform average:
/// logits of standard deviation 3 to 6 over the heads, each eighth head peaked, each eighth local
/// (a token attends to itself and its like), and outlier latent channels.
LayerMemory seeded_layer(const ModelConfig& config, std::uint64_t seed, std::int64_t layer,
                         DType dtype, ThreadPool& pool);

}  // namespace fovea
