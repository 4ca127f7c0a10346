// A model's layers as the float64 oracle takes them, and rows against what it says.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "fovea/kv_format.h"
#include "fovea/model.h"
#include "fovea/oracle.h"

namespace fovea::engine {

/// Elements of a view of rank 1 or 2 with unit innermost stride, decoded by the oracle itself.
std::vector<double> to_doubles(const TensorView& view);
/// The same of a projection, times its scales where it is FP8.
std::vector<double> to_doubles(const TensorView& projection, const WeightScale& scale);

/// How the oracle decodes a cache's rows.
oracle::RowFormat oracle_row_format(const KvFormat& format);

/// |got - expected| / |expected| of a row; infinite when anything is NaN or nothing was expected.
double relative_error(std::span<const double> expected, std::span<const double> got);

/// A layer's attention weights. Softmax scale, rotation and rules come from the config's numbers by
/// the oracle's own formulas, not from what the model made of them.
oracle::MlaWeights oracle_mla_weights(const Model& model, std::int64_t layer);
oracle::GqaWeights oracle_gqa_weights(const Model& model, std::int64_t layer);

/// A layer of either kind in float64.
class OracleLayer {
 public:
  OracleLayer(const Model& model, std::int64_t layer);

  /// Of normed hidden states: what the cache must hold, and the queries, whose keys it holds.
  std::vector<double> stored_rows(std::span<const double> normed,
                                  std::span<const std::int64_t> positions) const;
  std::vector<double> queries(std::span<const double> normed,
                              std::span<const std::int64_t> positions) const;
  /// Before o_proj: of the last token of a sequence, over all rows of it. Rows that the layer's
  /// rules hide may hold anything.
  std::vector<double> attention(std::span<const double> query, std::span<const double> rows) const;
  std::vector<double> o_proj(std::span<const double> attended) const;

 private:
  std::variant<oracle::MlaWeights, oracle::GqaWeights> weights_;
};

}  // namespace fovea::engine
