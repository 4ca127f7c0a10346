// How one token is stored, byte for byte. docs of each format: src/kv/formats/<name>/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/dtype.h"

namespace fovea {

/// Where the scales of a stored row are. A scale multiplies the stored value.
enum class KvScales : std::uint8_t {
  none,        ///< Elements of f32, f16 or bf16 are the values.
  per_tensor,  ///< KvFormat::scale for all rows; f8e4m3fn or f8e5m2.
  /// Two float32 behind each head's elements: the first is of its first `first_group` elements, the
  /// second of the others; i8, f8e4m3fn or i4.
  per_token,
  /// DeepSeek's sparse-attention row of 656 bytes: 512 f8e4m3fn, a float32 for each 128 of them,
  /// then 64 bf16 that have none.
  ds_mla,
};

/// The stored form of one token of one layer: `row_elements` elements of `dtype`, head by head. For
/// MLA a row is [kv_c | k_pe], kv_lora_rank + qk_rope_head_dim elements of one head, and serves as
/// K and V through the same scales.
struct KvFormat {
  /// Elements of a head that has scales, at most: kernels encode and decode heads on the stack.
  static constexpr std::int64_t kMaxScaledHead = 2048;

  DType dtype = DType::bf16;
  std::int64_t row_elements = 0;  ///< Of all heads.
  KvScales scales = KvScales::none;
  std::int64_t num_heads = 1;    ///< Key heads in a row; with KvScales::per_token they matter.
  std::int64_t first_group = 0;  ///< KvScales::per_token: elements of a head under its first scale.
  float scale = 1.f;             ///< KvScales::per_tensor.
  /// KvScales::ds_mla: scales are rounded up to powers of two when rows are written; any are read.
  bool power_of_two_scales = false;

  std::int64_t head_elements() const { return row_elements / num_heads; }
  /// Bytes of one head, its scales included.
  std::int64_t head_bytes() const;
  std::int64_t row_bytes() const { return num_heads * head_bytes(); }
  /// Rows start at multiples of it.
  std::int64_t alignment() const;
  /// "int8_per_token".
  std::string name() const;
  bool operator==(const KvFormat&) const = default;
};

/// Scales of keys and values, as checkpoints give them for per-tensor formats.
struct KvScalePair {
  float k_scale = 1.f;
  float v_scale = 1.f;
};

/// bf16, f16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla, int8_per_token, fp8_per_token, int4_per_token.
const std::vector<std::string_view>& kv_format_names();

/// Latent rows [kv_c | k_pe] in the format of that name. Throws Error(invalid_argument) on an
/// unknown name, on scales that differ (the latent is key and value in one) and on widths that the
/// format does not have; Error(unsupported) on fp8_e4m3fnuz.
KvFormat latent_format(std::string_view name, std::int64_t kv_lora_rank,
                       std::int64_t qk_rope_head_dim, const KvScalePair& scales = {});

/// Rows of `num_heads` heads of keys or of values in the format of that name; per-token scales are
/// those of the first and of the second half of a head's channels. `scale` as KvFormat::scale.
KvFormat heads_format(std::string_view name, std::int64_t num_heads, std::int64_t head_dim,
                      float scale = 1.f);

/// Writes a row [row_bytes()] from values [row_elements]. Scales of groups are amax over the
/// largest code; quotients round to nearest even and saturate. The bytes depend on the row alone.
void encode_row(const KvFormat& format, std::span<const float> values, std::span<std::byte> row);
/// The float32 values of a row.
void decode_row(const KvFormat& format, std::span<const std::byte> row, std::span<float> values);

}  // namespace fovea
