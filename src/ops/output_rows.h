// One row of a quantised output. Both CPU backends write rows with it; how rows come to float32 and
// to threads is theirs.
#pragma once

#include <algorithm>
#include <span>

#include "fovea/ops.h"

namespace fovea {

class OutputRows {
 public:
  /// Channels of a group at most: what a buffer for write_group holds.
  static constexpr std::int64_t kMaxGroup = 128;

  /// `params` passed every check.
  explicit OutputRows(const QuantizeOutputParams& params);

  /// Groups of a row; with one scale for all rows, pieces of kMaxGroup channels.
  std::int64_t num_groups() const { return num_groups_; }
  std::int64_t group_begin(std::int64_t group) const { return group * group_size_; }
  std::int64_t group_size(std::int64_t group) const {
    return std::min(group_size_, params_.x.shape[1] - group_begin(group));
  }
  /// Codes and scale of a group of row `t` from its values [group_size].
  void write_group(std::int64_t t, std::int64_t group, std::span<const float> values) const;
  /// Zeros for row `t`.
  void clear(std::int64_t t) const;
  /// Zeros for scales that belong to no row or to no group: nvfp4's padding.
  void clear_padding() const;

 private:
  std::span<std::byte> codes(std::int64_t t, std::int64_t begin, std::int64_t count) const;
  void write_group_scale(std::int64_t t, std::int64_t group, float scale) const;

  const QuantizeOutputParams& params_;
  OutputQuant kind_;
  float scale_;  ///< Of stored values.
  std::int64_t num_groups_;
  std::int64_t group_size_;
};

}  // namespace fovea
