// Rotary position embedding: frequencies of each scaling, and the cos/sin table.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "fovea/ops.h"
#include "fovea/tensor.h"

namespace fovea {

/// Positions divided by `factor` (Chen et al. 2023).
struct LinearScaling {
  double factor = 1;
};

/// Theta grows with the length beyond the original one: theta * (factor * length / original -
/// (factor - 1))^(R / (R - 2)), as Hugging Face computes it for a sequence of `length`, which is
/// the table's: one sequence's cached keys must not mix several.
struct DynamicNtkScaling {
  double factor = 1;
  std::int64_t original_max_position = 0;
};

/// YaRN (Peng et al. 2023). The cos/sin amplitude is, as DeepSeek has it, mscale(factor, mscale) /
/// mscale(factor, mscale_all_dim); the softmax scale's mscale(factor, mscale_all_dim)^2 is another
/// factor, part of MlaDims::sm_scale.
struct YarnScaling {
  double factor = 1;
  std::int64_t original_max_position = 4096;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  std::optional<double> attention_factor = {};  ///< The amplitude itself, whatever the mscales.
  /// The ramp between kept and slowed channel pairs starts and ends at whole pairs.
  bool truncate = true;
};

/// Llama 3.1: pairs that turn less than low_freq_factor times within the original length are slowed
/// by `factor`, those that turn more than high_freq_factor times are kept, a ramp between.
struct Llama3Scaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  std::int64_t original_max_position = 0;
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
  std::int64_t dim = 0;  ///< R, even; of a wider head the first R channels turn.
  double theta = 10000.0;
  std::int64_t max_position = 0;  ///< Rows of the table.
  RopePairing pairing = RopePairing::interleaved;
  MropeSections sections;  ///< Of a multi-axis rotation.
  std::variant<std::monostate, LinearScaling, DynamicNtkScaling, YarnScaling, Llama3Scaling,
               LongRopeScaling>
      scaling = {};
};

/// 0.1 * m * ln(factor) + 1 for factor > 1, else 1.
double yarn_mscale(double factor, double m);

/// The table of every position. Immutable.
class RotaryEmbedding {
 public:
  RotaryEmbedding() = default;
  /// Its table is kept in `memory`. Throws Error(invalid_argument) that names the field.
  explicit RotaryEmbedding(const RopeConfig& config, const MemorySource& memory = {});

  const RopeConfig& config() const { return config_; }
  std::vector<double> inv_freq() const;                          ///< [R / 2]
  double amplitude() const;                                      ///< Factor of cosine and sine.
  const TensorView& cos_sin() const { return cos_sin_.view(); }  ///< [max_position, R] f32

  /// The operands of an op that turns tokens at `positions`.
  RopeAngles angles(const TensorView& positions) const;
  /// Rotates x [T, N, R] in place; positions [T] or [1, T], with sections [3, T].
  void operator()(const OpContext& ctx, const TensorView& x, const TensorView& positions) const;

 private:
  RopeConfig config_;
  Tensor cos_sin_;
};

}  // namespace fovea
