// Rotary position embedding: frequencies of each scaling, and the cos/sin table.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fovea/ops.h"
#include "fovea/tensor.h"

namespace fovea {

/// YaRN as DeepSeek uses it (Peng et al. 2023). The cos/sin amplitude is mscale(factor, mscale) /
/// mscale(factor, mscale_all_dim); the softmax scale's mscale(factor, mscale_all_dim)^2 is another
/// factor, part of MlaDims::sm_scale.
struct YarnScaling {
  double factor = 1;
  std::int64_t original_max_position = 4096;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
};

/// LongRoPE (Ding et al. 2024): one divisor per channel pair, and amplitude
/// sqrt(1 + ln(max / original) / ln(original)) for a max beyond the original length. The short
/// divisors serve a table of up to the original length, the long ones every longer table: one
/// sequence's cached keys must not mix both.
struct LongRopeScaling {
  std::vector<double> short_factor;  ///< [R / 2]
  std::vector<double> long_factor;   ///< [R / 2]
  std::int64_t original_max_position = 0;
  std::int64_t max_position = 0;  ///< Of the trained model; 0: RopeConfig::max_position.
};

struct RopeConfig {
  std::int64_t dim = 0;  ///< R, even.
  double theta = 10000.0;
  std::int64_t max_position = 0;  ///< Rows of the table.
  RopePairing pairing = RopePairing::interleaved;
  std::variant<std::monostate, YarnScaling, LongRopeScaling> scaling = {};
};

/// 0.1 * m * ln(factor) + 1 for factor > 1, else 1.
double yarn_mscale(double factor, double m);

/// The table of every position. Immutable.
class RotaryEmbedding {
 public:
  RotaryEmbedding() = default;
  /// Throws Error(invalid_argument) that names the field.
  explicit RotaryEmbedding(const RopeConfig& config);

  const RopeConfig& config() const { return config_; }
  std::vector<double> inv_freq() const;                          ///< [R / 2]
  double amplitude() const;                                      ///< Factor of cosine and sine.
  const TensorView& cos_sin() const { return cos_sin_.view(); }  ///< [max_position, R] f32

  /// Rotates x [T, N, R] in place; positions [T] or [1, T].
  void operator()(const OpContext& ctx, const TensorView& x, const TensorView& positions) const;

 private:
  RopeConfig config_;
  Tensor cos_sin_;
};

}  // namespace fovea
