// A cache's format as the oracle decodes it.
#pragma once

#include <utility>

#include "fovea/kv_format.h"
#include "fovea/oracle.h"

namespace fovea::test {

inline oracle::RowFormat oracle_format(const KvFormat& format) {
  static constexpr std::pair<DType, oracle::Format> kFormats[] = {
      {DType::f32, oracle::Format::f32},
      {DType::f16, oracle::Format::f16},
      {DType::bf16, oracle::Format::bf16},
      {DType::i8, oracle::Format::i8},
      {DType::f8e4m3fn, oracle::Format::f8e4m3fn},
      {DType::f8e5m2, oracle::Format::f8e5m2},
      {DType::i4, oracle::Format::i4}};
  oracle::RowFormat row{.num_heads = format.num_heads,
                        .first_group = format.first_group,
                        .scale = static_cast<double>(format.scale)};
  for (const auto& [dtype, known] : kFormats) {
    if (dtype == format.dtype) row.format = known;
  }
  row.scales = static_cast<oracle::RowScales>(format.scales);
  return row;
}

}  // namespace fovea::test
