// What the seeded weights of either attention kind are made of; see seeded_weights.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "fovea/model.h"
#include "fovea/thread_pool.h"

namespace fovea {

constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio

constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

enum class Domain : std::uint64_t { tensor = 1, token = 2 };
enum class TensorId : std::uint64_t {
  input_layernorm,
  q_a_proj,
  q_a_layernorm,
  q_b_proj,
  kv_a_proj,
  kv_a_layernorm,
  kv_b_proj,
  o_proj,
  q_a_bias,
  kv_a_bias,
  o_bias,
  q_proj,
  k_proj,
  v_proj,
  q_bias,
  k_bias,
  v_bias,
  q_norm,
  k_norm,
  sinks,
  post_attention_layernorm,
};

std::uint64_t stream_key(Domain domain, std::uint64_t seed, std::uint64_t major,
                         std::uint64_t minor);

/// Element `index` of a stream before its scale.
inline float centred_sum(std::uint64_t key, std::uint64_t index) {
  const std::uint64_t h = mix(key + (index + 1) * kStep);
  constexpr std::int32_t kMean = 2 * 65535;
  const std::uint64_t sum = (h & 0xffff) + ((h >> 16) & 0xffff) + ((h >> 32) & 0xffff) + (h >> 48);
  return static_cast<float>(static_cast<std::int32_t>(sum) - kMean);
}

/// What brings centred_sum to the standard deviation `std`.
inline float scale_of(double std) {
  return static_cast<float>(std / std::sqrt((65536.0 * 65536.0 - 1) / 3));
}

// Of norm weights, around 1: smallest about 0.13, as a sum ends at 3.5 standard deviations.
constexpr float kNormSpread = 0.25f;
// Variance of a normed activation of unit variance, whose weights spread around 1.
constexpr double kNormedVariance = 1 + double{kNormSpread} * double{kNormSpread};
// Heads by index modulo 8. In bf16 a logit is off by a third of a percent of its head's standard
// deviation, so a row's error grows with these: 4.0 and 3.0 keep the mean over heads above 3 for
// every preset and the worst of thousands of rows below 1.2e-2 (with 4.5, 1.05e-2 was seen in 83).
constexpr std::int64_t kHeadPeriod = 8;
constexpr std::int64_t kPeakedHead = 3;
constexpr std::int64_t kLocalHead = 5;
constexpr double kPeakedStd = 4.0;
constexpr double kPlainStd = 3.0;
// Of models that norm queries and keys, all heads alike: these are rounded twice more on their way
// to the logit.
constexpr double kNormedStd = 1.5;
// A local head's logit of a token with itself: about a third of the weight among a thousand keys,
// so that a lost last token shows.
constexpr double kLocalLogit = 10.0;
// Output of about 0.25 per channel: context shows in the next layer without drowning the token.
constexpr double kOutputStd = 0.5;
constexpr double kBiasStd = 0.5;

/// Elements of one row of a matrix, times `scale`.
void random_row(std::uint64_t key, std::int64_t row, std::int64_t columns, float scale, float* out);
/// A norm's weights around `centre`.
void norm_row(std::uint64_t key, std::int64_t size, float centre, float* out);

/// Makes a layer's tensors in float32 rows, stores them in its dtype and owns them.
class SeededTensors {
 public:
  SeededTensors(std::uint64_t seed, std::int64_t layer, DType dtype, ThreadPool& pool)
      : seed_(seed), layer_(layer), dtype_(dtype), pool_(pool) {}

  std::uint64_t key(TensorId id) const {
    return stream_key(Domain::tensor, seed_, static_cast<std::uint64_t>(layer_),
                      static_cast<std::uint64_t>(id));
  }

  /// `row(r, out)` fills out [columns]; a one-dimensional tensor is a single row.
  template <class Row>
  TensorView fill(std::initializer_list<std::int64_t> shape, Row&& row) {
    const TensorView view = allocate(shape);
    const std::int64_t rows = shape.size() == 1 ? 1 : *shape.begin();
    const std::int64_t columns = *(shape.end() - 1);
    const std::int64_t tasks = std::min<std::int64_t>(pool_.num_threads(), rows);
    pool_.run(tasks, [&](std::int64_t task) {
      std::vector<float> values(static_cast<std::size_t>(columns));
      for (std::int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) {
        row(r, values.data());
        store(values.data(), columns, view, r * columns);
      }
    });
    return view;
  }

  TensorView random(TensorId id, std::initializer_list<std::int64_t> shape, double std);
  TensorView norm_weight(TensorId id, std::int64_t size, float centre = 1.f);

  std::vector<Tensor> take_memory() && { return std::move(memory_); }

 private:
  TensorView allocate(std::initializer_list<std::int64_t> shape);
  static void store(const float* values, std::int64_t count, const TensorView& dst,
                    std::int64_t offset);

  std::uint64_t seed_;
  std::int64_t layer_;
  DType dtype_;
  ThreadPool& pool_;
  std::vector<Tensor> memory_;
};

/// The weights of a layer with grouped-query attention.
AttentionWeights seeded_gqa(const ModelConfig& config, std::int64_t layer, SeededTensors& tensors);

}  // namespace fovea
