// Names of formats, and the codec of each.
#include "fovea/kv_format.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/float_bits.h"
#include "kv/formats/format.h"
#include "kv/formats/fp8_ds_mla/codec.h"
#include "kv/formats/fp8_per_tensor/codec.h"
#include "kv/formats/fp8_per_tensor/layout.h"
#include "kv/formats/per_token/codec.h"
#include "kv/formats/plain/codec.h"
#include "kv/formats/plain/layout.h"

namespace fovea {
namespace {

struct NamedFormat {
  std::string_view name;
  DType dtype;
  KvScales scales;
};
constexpr NamedFormat kFormats[] = {
    {"bf16", DType::bf16, KvScales::none},
    {"f16", DType::f16, KvScales::none},
    {"f32", DType::f32, KvScales::none},
    {"fp8_e4m3", DType::f8e4m3fn, KvScales::per_tensor},
    {"fp8_e5m2", DType::f8e5m2, KvScales::per_tensor},
    {"fp8_ds_mla", DType::f8e4m3fn, KvScales::ds_mla},
    {"int8_per_token", DType::i8, KvScales::per_token},
    {"fp8_per_token", DType::f8e4m3fn, KvScales::per_token},
    {"int4_per_token", DType::i4, KvScales::per_token},
};

// The bound leaves room for row_bytes() to be computed.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 40;

/// Before widths are added or multiplied.
void check_width(const char* name, std::int64_t value, std::int64_t min, std::int64_t max) {
  FOVEA_CHECK(value >= min && value <= max, invalid_argument, "{} is {}, but must be in [{}, {}]",
              name, value, min, max);
}

const NamedFormat& find_format(std::string_view name) {
  FOVEA_CHECK(
      name != "fp8_e4m3fnuz", unsupported,
      "KV format is fp8_e4m3fnuz, but must be fp8_e4m3: with another bias the same bytes are "
      "other values");
  std::string known;
  for (const NamedFormat& format : kFormats) {
    if (format.name == name) return format;
    known += (known.empty() ? "" : ", ") + std::string(format.name);
  }
  fail(ErrorCode::invalid_argument, "KV format is {}, but must be one of {}", name, known);
}

}  // namespace

std::int64_t KvFormat::head_bytes() const {
  switch (scales) {
    case KvScales::none:
      break;
    case KvScales::per_tensor:
      return kv_fp8_per_tensor::head_bytes(*this);
    case KvScales::per_token:
      return kv_per_token::head_bytes(*this);
    case KvScales::ds_mla:
      return kv_fp8_ds_mla::kRowBytes;
  }
  return bytes_of(dtype, head_elements());
}

std::int64_t KvFormat::alignment() const {
  switch (scales) {
    case KvScales::none:
      return kv_plain::row_alignment(*this);
    case KvScales::per_tensor:
    case KvScales::per_token:
      break;
    case KvScales::ds_mla:
      return sizeof(BFloat16);  // Of the rope part, which is read by its type.
  }
  return 1;
}

std::string KvFormat::name() const {
  for (const NamedFormat& format : kFormats) {
    if (format.dtype == dtype && format.scales == scales) return std::string(format.name);
  }
  return std::string(name_of(dtype)) + " (no KV format)";
}

const std::vector<std::string_view>& kv_format_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const NamedFormat& format : kFormats) list.push_back(format.name);
    return list;
  }();
  return names;
}

void check_format(const KvFormat& format) {
  FOVEA_CHECK(format.row_elements >= 1 && format.row_elements <= kMaxElements, invalid_argument,
              "format.row_elements is {}, but must be in [1, {}]", format.row_elements,
              kMaxElements);
  FOVEA_CHECK(format.num_heads >= 1 && format.row_elements % format.num_heads == 0,
              invalid_argument,
              "format.num_heads is {}, but must be positive and divide row_elements, {}",
              format.num_heads, format.row_elements);
  FOVEA_CHECK(format.scales == KvScales::none || format.head_elements() <= KvFormat::kMaxScaledHead,
              unsupported, "a head has {} elements, but may have {} with scales",
              format.head_elements(), KvFormat::kMaxScaledHead);
  switch (format.scales) {
    case KvScales::none:
      return kv_plain::check(format);
    case KvScales::per_tensor:
      return kv_fp8_per_tensor::check(format);
    case KvScales::per_token:
      return kv_per_token::check(format);
    case KvScales::ds_mla:
      return kv_fp8_ds_mla::check(format);
  }
  fail(ErrorCode::invalid_argument, "format.scales is {}, but must be a KvScales",
       static_cast<int>(format.scales));
}

KvFormat latent_format(std::string_view name, std::int64_t kv_lora_rank,
                       std::int64_t qk_rope_head_dim, const KvScalePair& scales) {
  const NamedFormat& named = find_format(name);
  FOVEA_CHECK(
      scales.k_scale == scales.v_scale, invalid_argument,
      "k_scale is {} and v_scale {}, but must be equal: a latent row is key and value in one",
      scales.k_scale, scales.v_scale);
  check_width("kv_lora_rank", kv_lora_rank, 1, kMaxElements);
  check_width("qk_rope_head_dim", qk_rope_head_dim, 0, kMaxElements);
  KvFormat format{.dtype = named.dtype,
                  .row_elements = kv_lora_rank + qk_rope_head_dim,
                  .scales = named.scales};
  if (named.scales == KvScales::per_token) format.first_group = kv_lora_rank;
  if (named.scales == KvScales::per_tensor) format.scale = scales.k_scale;
  check_format(format);
  FOVEA_CHECK(named.scales != KvScales::ds_mla || kv_lora_rank == kv_fp8_ds_mla::kLatent,
              unsupported, "kv_lora_rank is {}, but must be {} for fp8_ds_mla", kv_lora_rank,
              kv_fp8_ds_mla::kLatent);
  return format;
}

KvFormat heads_format(std::string_view name, std::int64_t num_heads, std::int64_t head_dim,
                      float scale) {
  const NamedFormat& named = find_format(name);
  FOVEA_CHECK(
      named.scales != KvScales::ds_mla, unsupported,
      "KV format is fp8_ds_mla, but must be another one for keys and values of heads: it is "
      "a latent row");
  check_width("num_heads", num_heads, 1, kMaxElements);
  check_width("head_dim", head_dim, 1, kMaxElements / num_heads);
  KvFormat format{.dtype = named.dtype,
                  .row_elements = num_heads * head_dim,
                  .scales = named.scales,
                  .num_heads = num_heads};
  // Whole pairs of nibbles lie in each half.
  if (named.scales == KvScales::per_token) format.first_group = head_dim / 4 * 2;
  if (named.scales == KvScales::per_tensor) format.scale = scale;
  check_format(format);
  return format;
}

void encode_head(const KvFormat& format, std::span<const float> values, std::span<std::byte> head) {
  switch (format.scales) {
    case KvScales::none:
      return kv_plain::encode_head(format, values, head);
    case KvScales::per_tensor:
      return kv_fp8_per_tensor::encode_head(format, values, head);
    case KvScales::per_token:
      return kv_per_token::encode_head(format, values, head);
    case KvScales::ds_mla:
      return kv_fp8_ds_mla::encode_row(format, values, head);
  }
}

void decode_head(const KvFormat& format, std::span<const std::byte> head, std::span<float> values) {
  switch (format.scales) {
    case KvScales::none:
      return kv_plain::decode_head(format, head, values);
    case KvScales::per_tensor:
      return kv_fp8_per_tensor::decode_head(format, head, values);
    case KvScales::per_token:
      return kv_per_token::decode_head(format, head, values);
    case KvScales::ds_mla:
      return kv_fp8_ds_mla::decode_row(head, values);
  }
}

namespace {

/// Calls fn(values of a head, bytes of a head) for each.
template <class Values, class Bytes, class F>
void for_each_head(const KvFormat& format, std::span<Values> values, std::span<Bytes> row, F&& fn) {
  check_format(format);
  FOVEA_CHECK(std::ssize(values) == format.row_elements && std::ssize(row) == format.row_bytes(),
              invalid_argument, "a row has {} values and {} bytes, but must have {} and {} as {}",
              values.size(), row.size(), format.row_elements, format.row_bytes(), format.name());
  const auto elements = static_cast<std::size_t>(format.head_elements());
  const auto bytes = static_cast<std::size_t>(format.head_bytes());
  for (std::size_t h = 0; h < static_cast<std::size_t>(format.num_heads); ++h) {
    fn(values.subspan(h * elements, elements), row.subspan(h * bytes, bytes));
  }
}

}  // namespace

void encode_row(const KvFormat& format, std::span<const float> values, std::span<std::byte> row) {
  for_each_head(format, values, row, [&](std::span<const float> from, std::span<std::byte> to) {
    encode_head(format, from, to);
  });
}

void decode_row(const KvFormat& format, std::span<const std::byte> row, std::span<float> values) {
  for_each_head(format, values, row, [&](std::span<float> to, std::span<const std::byte> from) {
    decode_head(format, from, to);
  });
}

}  // namespace fovea
