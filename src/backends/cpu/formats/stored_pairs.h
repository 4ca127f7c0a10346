// Stored heads of formats whose elements are bf16 or widen to it exactly, as codes and scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels.h"
#include "fovea/kv_format.h"

namespace fovea::cpu {

/// Reads the heads of rows of one format for kernels that multiply pairs.
class StoredPairs {
 public:
  /// Whether heads of `format` can be read so, and their first `v_channels` as values: groups of
  /// these must be whole vectors.
  static bool takes(const Kernels& kernels, const KvFormat& format, std::int64_t v_channels);
  /// Groups of a head's first `channels`.
  static ChannelGroups groups(const KvFormat& format, std::int64_t channels);

  /// The number of heads is the op's: formats without scales per head need not know it.
  StoredPairs(const Kernels& kernels, const KvFormat& format, std::int64_t num_heads)
      : kernels_(kernels), format_(format) {
    format_.num_heads = num_heads;
    head_bytes_ = format_.head_bytes();
  }

  /// The codes of head `head` of the row at `row` as bf16, which are in `copy`, with room for 31
  /// elements more, unless they lie in the row as they are. `scales`: of each group.
  const std::byte* load(const std::byte* row, std::int64_t head, std::byte* copy,
                        float* scales) const;
  /// The same of i8 as int16.
  const std::byte* load_int16(const std::byte* row, std::int64_t head, std::byte* copy,
                              float* scales) const;
  const std::byte* head_of(const std::byte* row, std::int64_t head) const {
    return row + head * head_bytes_;
  }

 private:
  void load_scales(const std::byte* head, float* scales) const;
  void widen(const std::byte* src, std::int64_t n, std::byte* dst) const;

  const Kernels& kernels_;
  KvFormat format_;
  std::int64_t head_bytes_;
};

}  // namespace fovea::cpu
