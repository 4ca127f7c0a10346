// Attention of few rows in place, on plain memory, where ops cannot look: rows of several heads in
// one block, hidden tokens, and bits.
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend_cpu/cpu_test.h"
#include "backends/cpu/in_place_state.h"
#include "backends/cpu/query_codes.h"
#include "support/poison.h"

namespace fovea::test {
namespace {

using cpu::kBlockRows;
using cpu::kTileTokens;

constexpr std::int64_t kQk = 40, kV = 72, kOutStride = 80;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float normal(std::uint64_t seed, std::int64_t a, std::int64_t b) {
  return static_cast<float>(
      random_normal(seed + static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
}

/// The same rows [first, first + count) of each of `heads` heads against one tile of f32.
struct Block {
  Block(const cpu::Kernels& set, std::int64_t num_heads, std::int64_t first, std::int64_t count,
        std::int64_t num_tokens)
      : kernels(set),
        heads(num_heads),
        tokens(num_tokens),
        stride(static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)))),
        q(static_cast<std::size_t>(kBlockRows * kOutStride)),
        out(static_cast<std::size_t>(kBlockRows * kOutStride)),
        row_max(kBlockRows, -std::numeric_limits<float>::infinity()),
        row_sum(kBlockRows),
        scores(kBlockRows * kTileTokens),
        k(static_cast<std::size_t>(kTileTokens * heads * kQk)),
        v(static_cast<std::size_t>(kTileTokens * heads * kV)),
        masks(kBlockRows, ~std::uint64_t{0}) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t c = 0; c < kQk; ++c) {
          q[at((h * stride + r) * kOutStride + c)] = normal(1, 100 * h + first + r, c);
        }
      }
      for (std::int64_t t = 0; t < kTileTokens; ++t) {
        for (std::int64_t c = 0; c < kQk; ++c) *key(h, t, c) = normal(1000, 100 * h + t, c);
        for (std::int64_t c = 0; c < kV; ++c) *value(h, t, c) = normal(20000, 100 * h + t, c);
      }
    }
    tile.heads = heads;
    tile.head_rows = count;
    tile.rows = heads * stride;
  }
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  float* key(std::int64_t h, std::int64_t t, std::int64_t c) {
    return &k[at((t * heads + h) * kQk + c)];
  }
  float* value(std::int64_t h, std::int64_t t, std::int64_t c) {
    return &v[at((t * heads + h) * kV + c)];
  }
  std::uint64_t& mask(std::int64_t h, std::int64_t r) { return masks[at(h * stride + r)]; }
  const float* row(std::int64_t h, std::int64_t r) const {
    return &out[at((h * stride + r) * kOutStride)];
  }
  float max_of(std::int64_t h, std::int64_t r) const { return row_max[at(h * stride + r)]; }
  float sum_of(std::int64_t h, std::int64_t r) const { return row_sum[at(h * stride + r)]; }

  void run(bool masked) {
    const std::byte* k_rows[kTileTokens] = {};
    const std::byte* v_rows[kTileTokens] = {};
    for (std::int64_t t = 0; t < kTileTokens; ++t) {
      k_rows[t] = reinterpret_cast<const std::byte*>(key(0, std::min(t, tokens - 1), 0));
      v_rows[t] = reinterpret_cast<const std::byte*>(value(0, std::min(t, tokens - 1), 0));
    }
    const auto rows = [](const std::byte* const* from, std::int64_t channels) {
      return cpu::StoredRows{.rows = from,
                             .head_at = 0,
                             .head_bytes = channels * 4,
                             .scales_at = -1,
                             .scale = 1.f,
                             .channels = channels,
                             .groups = {.count = 1, .end = {channels}}};
    };
    tile.k = rows(k_rows, kQk);
    tile.v = rows(v_rows, kV);
    tile.asks_for_values = true;
    tile.next_keys = k_rows;
    tile.num_next_keys = tokens;
    tile.q = q.data();
    tile.out = out.data();
    tile.scores = scores.data();
    tile.row_max = row_max.data();
    tile.row_sum = row_sum.data();
    tile.row_mask = masked ? masks.data() : nullptr;
    tile.soft_cap = 0.f;
    tile.capacity = kTileTokens;
    tile.tokens = tokens;
    tile.head_stride = stride;
    tile.q_stride = kOutStride;
    tile.out_stride = kOutStride;
    alignas(64) float correction[kBlockRows];
    kernels.score_in_place[0](tile);
    kernels.weigh(tile, correction);
    kernels.add_in_place[0](tile, correction);
  }

  const cpu::Kernels& kernels;
  std::int64_t heads, tokens, stride;
  std::vector<float> q, out, row_max, row_sum, scores, k, v;
  std::vector<std::uint64_t> masks;
  cpu::InPlaceTile tile;
};

class InPlace : public IsaTest {};
FOVEA_FOR_EACH_ISA(InPlace);

TEST_P(InPlace, RowsAreSoftmaxOfTheirHead) {
  constexpr std::int64_t kHeads = 3, kCount = 7, kTokens = 51;
  Block block(kernels(), kHeads, 0, kCount, kTokens);
  block.run(false);
  for (std::int64_t h = 0; h < kHeads; ++h) {
    for (std::int64_t r = 0; r < kCount; ++r) {
      double sum = 0;
      std::vector<double> expected(kV);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        double score = 0;
        for (std::int64_t c = 0; c < kQk; ++c) {
          const std::int64_t q = (h * block.stride + r) * kOutStride + c;
          score += static_cast<double>(block.q[Block::at(q)]) *
                   static_cast<double>(*block.key(h, t, c));
        }
        const double weight = std::exp2(score - static_cast<double>(block.max_of(h, r)));
        sum += weight;
        for (std::int64_t c = 0; c < kV; ++c) {
          expected[Block::at(c)] += weight * static_cast<double>(*block.value(h, t, c));
        }
      }
      EXPECT_NEAR(sum, block.sum_of(h, r), 1e-5 * sum);
      for (std::int64_t c = 0; c < kV; ++c) {
        EXPECT_NEAR(expected[Block::at(c)], block.row(h, r)[c], 1e-5 * sum)
            << "head " << h << ", row " << r << ", channel " << c;
      }
    }
  }
}

TEST_P(InPlace, BitsOfARowDoNotDependOnRowsBesideIt) {
  for (bool masked : {false, true}) {
    for (std::int64_t tokens : {1, 5, 31, 33, 64}) {
      const auto mask_of = [](std::int64_t h, std::int64_t r) {
        return random_bits(7, static_cast<std::uint64_t>(100 * h + r)) | 1;
      };
      Block whole(kernels(), 2, 0, 8, tokens);
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t r = 0; r < 8; ++r) whole.mask(h, r) = mask_of(h, r);
      }
      whole.run(masked);
      for (std::int64_t first : {0, 1, 5}) {
        for (std::int64_t count : {1, 2, 3}) {
          Block part(kernels(), 2, first, count, tokens);
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t r = 0; r < count; ++r) part.mask(h, r) = mask_of(h, first + r);
          }
          part.run(masked);
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t r = 0; r < count; ++r) {
              EXPECT_EQ(0, std::memcmp(whole.row(h, first + r), part.row(h, r), kV * sizeof(float)))
                  << "head " << h << ", row " << first + r << ", " << tokens << " tokens";
              EXPECT_EQ(whole.sum_of(h, first + r), part.sum_of(h, r));
            }
          }
        }
      }
    }
  }
}

TEST_P(InPlace, ANaNReachesTheRowsThatSeeItAndNoOther) {
  // Row r of either head sees tokens [0, 9 r], of which the first head's 20th is NaN.
  constexpr std::int64_t kNanToken = 20;
  Block clean(kernels(), 2, 0, 6, kTileTokens), dirty(kernels(), 2, 0, 6, kTileTokens);
  std::fill_n(dirty.key(0, kNanToken, 0), kQk, kNan);
  std::fill_n(dirty.value(0, kNanToken, 0), kV, kNan);
  for (Block* block : {&clean, &dirty}) {
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t r = 0; r < 6; ++r) block->mask(h, r) = ~std::uint64_t{0} >> (63 - 9 * r);
    }
    block->run(true);
  }
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t r = 0; r < 6; ++r) {
      if (h == 1 || 9 * r < kNanToken) {
        EXPECT_EQ(0, std::memcmp(clean.row(h, r), dirty.row(h, r), kV * sizeof(float)))
            << "head " << h << ", row " << r;
        continue;
      }
      for (std::int64_t c = 0; c < kV; ++c) EXPECT_TRUE(std::isnan(dirty.row(h, r)[c])) << r;
    }
  }
}

TEST_P(InPlace, ProductsOfInt8AddUpExactly) {
  // Two groups, neither whole vectors and one wider than what is widened at once, whose scales lie
  // behind the codes; 1, 2 and 4 rows at once.
  constexpr std::int64_t kChannels = 350, kFirst = 50, kTokens = 51, kCount = 7;
  struct Key {
    std::int8_t codes[kChannels];
    std::byte scales[2 * sizeof(float)];
  };
  std::vector<Key> keys(kTokens);
  const std::byte* rows[kTileTokens] = {};
  const float scales[2] = {0x1p-9f, 0x1p-8f};
  for (std::int64_t t = 0; t < kTileTokens; ++t) {
    Key& key = keys[Block::at(std::min(t, kTokens - 1))];
    rows[t] = reinterpret_cast<const std::byte*>(&key);
    std::memcpy(key.scales, scales, sizeof scales);
    if (t >= kTokens) continue;
    for (std::int64_t c = 0; c < kChannels; ++c) {
      key.codes[c] = static_cast<std::int8_t>((37 * t + 101 * c) % 256 - 128);
    }
  }
  // Four rows share vectors, then two, then one has them alone; the second group begins with one.
  const std::int64_t lanes = kernels().lanes;
  const cpu::ChannelGroups groups{.count = 2, .end = {kFirst, kChannels}};
  const std::int64_t stride = cpu::query_code_stride(kernels(), kChannels);
  std::vector<std::int16_t> q(static_cast<std::size_t>(kCount * stride), -1);
  std::int16_t codes[kCount][kChannels];
  for (std::int64_t r = 0; r < kCount; ++r) {
    for (std::int64_t c = 0; c < kChannels; ++c) {
      codes[r][c] = static_cast<std::int16_t>((r * 7919 + c * 12289) % 65279 - 32639);
    }
    cpu::put_query_codes(kernels(), groups, codes[r], r, kCount, q.data(), stride);
  }
  std::vector<float> scores(kBlockRows * kTileTokens);
  std::vector<float> steps;
  for (int r = 0; r < 8; ++r) steps.push_back(0x1p-18f * static_cast<float>(8 + r));
  cpu::InPlaceTile tile{};
  tile.scores = scores.data();
  tile.capacity = kTileTokens;
  tile.tokens = kTokens;
  tile.rows = 8;
  tile.heads = 1;
  tile.head_rows = kCount;
  tile.head_stride = 8;
  tile.q_codes = q.data();
  tile.q_steps = steps.data();
  tile.q_code_stride = stride;
  tile.k = {.rows = rows, .head_at = 0, .head_bytes = sizeof(Key),
            .scales_at = kChannels, .scale = 0.f, .channels = kChannels, .groups = groups};
  kernels().score_int8_in_place(tile);
  for (std::int64_t r = 0; r < kCount; ++r) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      float expected = 0;
      for (int g = 0; g < 2; ++g) {
        std::int32_t sum = 0;
        for (std::int64_t c = g == 0 ? 0 : kFirst; c < tile.k.groups.end[g]; ++c) {
          sum += codes[r][c] * keys[Block::at(t)].codes[c];
        }
        expected += static_cast<float>(sum) * (steps[Block::at(r)] * scales[g]);
      }
      const float got = scores[Block::at((r / lanes * kTileTokens + t) * lanes + r % lanes)];
      ASSERT_NEAR(expected, got, 1e-6f * std::abs(expected) + 1e-5f)
          << "row " << r << ", token " << t;
    }
  }
}

/// Heads of two groups, neither whole vectors; an odd last token, and one that no row sees, whose
/// scales are NaN.
void expect_weights_meet_int8(const cpu::Kernels& kernels, std::int64_t heads,
                              std::int64_t count) {
  constexpr std::int64_t kChannels = 90, kFirst = 50, kStride = 112, kHeads = 16;
  constexpr std::int64_t kTokens = 51, kHidden = 17;
  const auto stride = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
  const std::int64_t num_rows = heads * stride;
  SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(count) + " rows");
  struct Value {
    std::int8_t codes[kChannels];
    std::byte scales[2 * sizeof(float)];
  };
  std::vector<std::array<Value, kHeads>> values(kTokens);
  const std::byte* rows[kTileTokens] = {};
  const auto scale_of = [](std::int64_t h, std::int64_t t, int g) {
    return t == kHidden ? kNan : 0.01f * static_cast<float>(1 + (h + 3 * t + 5 * g) % 7);
  };
  for (std::int64_t t = 0; t < kTileTokens; ++t) {
    auto& token = values[Block::at(std::min(t, kTokens - 1))];
    rows[t] = reinterpret_cast<const std::byte*>(&token);
    for (std::int64_t h = 0; t < kTokens && h < heads; ++h) {
      for (std::int64_t c = 0; c < kChannels; ++c) {
        token[Block::at(h)].codes[c] = static_cast<std::int8_t>((37 * t + 101 * c + h) % 256 - 128);
      }
      const float scales[2] = {scale_of(h, t, 0), scale_of(h, t, 1)};
      std::memcpy(token[Block::at(h)].scales, scales, sizeof scales);
    }
  }
  const std::int64_t lanes = kernels.lanes;
  std::vector<float> weights(kBlockRows * kTileTokens), out(Block::at(num_rows * kStride), 1.f);
  const auto weight = [&](std::int64_t row, std::int64_t t) -> float& {
    return weights[Block::at((row / lanes * kTileTokens + t) * lanes + row % lanes)];
  };
  std::vector<std::uint64_t> masks(Block::at(num_rows), ~(std::uint64_t{1} << kHidden));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      weight(row, t) = t == kHidden ? 0.f : std::exp2(-static_cast<float>((row * 5 + t * 3) % 17));
    }
  }
  cpu::InPlaceTile tile{};
  tile.scores = weights.data();
  tile.row_mask = masks.data();
  tile.capacity = kTileTokens;
  tile.tokens = kTokens;
  tile.rows = num_rows;
  tile.heads = heads;
  tile.head_rows = count;
  tile.head_stride = stride;
  tile.out = out.data();
  tile.out_stride = kStride;
  tile.v = {.rows = rows, .head_at = 0, .head_bytes = sizeof(Value),
            .scales_at = kChannels, .scale = 0.f, .channels = kChannels,
            .groups = {.count = 2, .end = {kFirst, kChannels}}};
  std::vector<float> correction;
  for (int row = 0; row < kBlockRows; ++row) correction.push_back(0.5f + 0x1p-6f * row);
  kernels.add_int8_in_place(tile, correction.data());
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t c = 0; c < kChannels; ++c) {
        const std::int64_t row = stride * h + r;
        double expected = static_cast<double>(correction[Block::at(row)]), squares = 0, largest = 0;
        for (std::int64_t t = 0; t < kTokens; ++t) {
          if (t == kHidden) continue;
          const double code = values[Block::at(t)][Block::at(h)].codes[c];
          const double scaled = static_cast<double>(weight(row, t) * scale_of(h, t, c >= kFirst));
          expected += scaled * code;
          squares += code * code;
          largest = std::max(largest, scaled);
        }
        // Each is off by 2^-16 of the largest at most: five times the root mean square of the sum.
        const double allowed = 3 * 0x1p-16 * largest * std::sqrt(squares);
        ASSERT_NEAR(expected, out[Block::at(row * kStride + c)], allowed)
            << "head " << h << ", row " << r << ", channel " << c;
      }
    }
  }
}

TEST_P(InPlace, WeightsInFixedPointMeetInt8) {
  // 1, 2 and 4 rows at once; row vectors that 1 to 16 heads share, all of them or one less.
  for (const auto& [heads, count] : {std::pair<std::int64_t, std::int64_t>{2, 7}, {3, 6}, {16, 1},
                                     {15, 1}, {8, 2}, {7, 2}, {4, 4}, {3, 3}, {1, 20}, {2, 16}}) {
    expect_weights_meet_int8(kernels(), heads, count);
  }
}

TEST_P(InPlace, ScratchDoesNotDependOnTheFormatOfKeys) {
  for (std::int64_t channels = 8; channels <= 256; channels += 8) {
    cpu::AttendShape shape;
    shape.qk_channels = shape.v_channels = channels;
    shape.max_rows = 64;
    shape.max_heads = 8;
    const std::int64_t dense = cpu::InPlaceState::bytes(kernels(), shape);
    shape.int8_keys = shape.int8_values = true;
    shape.k_groups = shape.v_groups = {.count = 2, .end = {channels / 2, channels}};
    EXPECT_EQ(dense, cpu::InPlaceState::bytes(kernels(), shape)) << channels;
  }
}

TEST_P(InPlace, QueryCodesEndWithTheirStride) {
  constexpr std::int64_t kRows = 7;
  constexpr std::int16_t kUnowned = 0x5a5a;
  for (std::int64_t channels = 2; channels <= 256; channels += 2) {
    const std::int64_t stride = cpu::query_code_stride(kernels(), channels);
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, channels / 2}) {
      const cpu::ChannelGroups groups{.count = 2, .end = {first, channels}};
      const std::vector<std::int16_t> codes(Block::at(channels), 1);
      std::vector<std::int16_t> q(Block::at(kRows * stride + 64), kUnowned);
      for (std::int64_t row = 0; row < kRows; ++row) {
        cpu::put_query_codes(kernels(), groups, codes.data(), row, kRows, q.data(), stride);
      }
      for (std::size_t i = Block::at(kRows * stride); i < q.size(); ++i) ASSERT_EQ(q[i], kUnowned);
    }
  }
}

}  // namespace
}  // namespace fovea::test
