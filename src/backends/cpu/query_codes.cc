#include "backends/cpu/query_codes.h"

#include <cstring>
#include <numeric>

namespace fovea::cpu {
namespace {

std::int64_t divided_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

/// A row's part of vectors that `rows` share.
struct Part {
  std::int64_t row, rows;
  std::int64_t vector;  ///< Bytes of one.

  std::int64_t bytes() const { return vector / rows; }
  std::byte* of(std::byte* vectors, std::int64_t index) const {
    return vectors + index * vector + row * bytes();
  }
};

std::int16_t code_at(const std::int16_t* codes, std::int64_t count, std::int64_t c) {
  return c < count ? codes[c] : std::int16_t{0};
}

/// The codes of a group, and zeros; returns the vectors.
std::int64_t put_words(const Part& part, const std::int16_t* codes, std::int64_t count,
                       std::byte* vectors) {
  const std::int64_t channels = part.bytes() / 2, steps = divided_up(count, channels);
  for (std::int64_t step = 0; step < steps; ++step) {
    std::byte* to = part.of(vectors, step);
    for (std::int64_t i = 0; i < channels; ++i) {
      const std::int16_t code = code_at(codes, count, step * channels + i);
      std::memcpy(to + 2 * i, &code, sizeof code);
    }
  }
  // Whole vectors of a row alone, however many share them: groups begin where its words would.
  return divided_up(count, part.vector / 2) * part.rows;
}

std::int64_t put_digits(const Part& part, const std::int16_t* codes, std::int64_t count,
                        std::byte* vectors) {
  const std::int64_t channels = part.bytes(), steps = divided_up(count, channels);
  const std::int32_t bias = -128 * std::accumulate(codes, codes + count, std::int32_t{0});
  std::memset(part.of(vectors, 0), 0, static_cast<std::size_t>(part.bytes()));
  std::memcpy(part.of(vectors, 0), &bias, sizeof bias);
  for (std::int64_t step = 0; step < steps; ++step) {
    std::byte *high = part.of(vectors, 1 + 2 * step), *low = part.of(vectors, 2 + 2 * step);
    for (std::int64_t i = 0; i < channels; ++i) {
      const std::int16_t code = code_at(codes, count, step * channels + i);
      const auto low_digit = static_cast<std::int8_t>(code);
      low[i] = static_cast<std::byte>(low_digit);
      high[i] = static_cast<std::byte>((code - low_digit) / 256);
    }
  }
  return 1 + 2 * steps;
}

}  // namespace

std::int64_t query_code_stride(const Kernels& kernels, std::int64_t channels) {
  // A row alone pads its groups most, and either group may begin one vector more.
  const std::int64_t vector = 4 * kernels.lanes;
  const std::int64_t vectors = kernels.query_digits
                                   ? 2 * (1 + divided_up(channels, vector) + 1)
                                   : divided_up(channels, vector / 2) + 1;
  return vectors * vector / 2;
}

void put_query_codes(const Kernels& kernels, const ChannelGroups& groups,
                     const std::int16_t* codes, std::int64_t row, std::int64_t head_rows,
                     std::int16_t* head, std::int64_t stride) {
  const std::int64_t left = head_rows - row / 4 * 4;
  const std::int64_t together = left >= 4 ? 4 : row % 4 < (left & 2) ? 2 : 1;
  const Part part{row % together, together, 4 * kernels.lanes};
  auto* vectors = reinterpret_cast<std::byte*>(head + (row - part.row) * stride);
  std::int64_t begin = 0;
  for (int g = 0; g < groups.count; begin = groups.end[g++]) {
    const auto put = kernels.query_digits ? put_digits : put_words;
    vectors += put(part, codes + begin, groups.end[g] - begin, vectors) * part.vector;
  }
}

}  // namespace fovea::cpu
