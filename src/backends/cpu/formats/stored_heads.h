// Stored heads of any format: read as f32 for the kernels, written from f32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels.h"
#include "fovea/kv_format.h"

namespace fovea::cpu {

/// Reads and writes the heads of rows of one format.
class StoredHeads {
 public:
  /// The number of heads is the op's: formats without scales per head need not know it.
  StoredHeads(const Kernels& kernels, const KvFormat& format, std::int64_t num_heads)
      : kernels_(kernels), format_(format) {
    format_.num_heads = num_heads;
    head_bytes_ = format_.head_bytes();
  }

  std::int64_t elements() const { return format_.head_elements(); }
  /// Head `head` of the row at `row` to f32, with zeros up to a whole vector.
  void load(const std::byte* row, std::int64_t head, float* dst) const;
  /// The head from f32.
  void store(const float* src, std::byte* row, std::int64_t head) const;
  /// Asks for the head's memory ahead of time, towards L2: L1 is for what the kernels work on.
  void prefetch(const std::byte* row, std::int64_t head) const {
    const std::byte* bytes = row + head * head_bytes_;
    for (std::int64_t i = 0; i < head_bytes_; i += 64) __builtin_prefetch(bytes + i, 0, 2);
  }

 private:
  void load_per_token(const std::byte* head, float* dst) const;
  void load_ds_mla(const std::byte* row, float* dst) const;
  void load_codes(const std::byte* src, std::int64_t n, float scale, float* dst) const;

  const Kernels& kernels_;
  KvFormat format_;
  std::int64_t head_bytes_;
};

}  // namespace fovea::cpu
