// The attention kernel on plain memory, where ops cannot look: exp2, lanes, and bits.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend_cpu/cpu_test.h"
#include "support/poison.h"

namespace fovea::test {
namespace {

using cpu::kBlockRows;
using cpu::kTileTokens;

/// A block of rows against one tile, with the buffers that AttendTile points into.
struct Block {
  Block(const cpu::Kernels& kernels, std::int64_t num_rows, std::int64_t num_tokens,
        std::int64_t qk_channels, std::int64_t v_channels)
      : lanes(kernels.lanes),
        q(static_cast<std::size_t>(kBlockRows * qk_channels)),
        k(static_cast<std::size_t>(kTileTokens * qk_channels)),
        v(static_cast<std::size_t>(kTileTokens * stride_of(v_channels))),
        out(static_cast<std::size_t>(kBlockRows * stride_of(v_channels))),
        row_max(kBlockRows, -std::numeric_limits<float>::infinity()),
        row_sum(kBlockRows),
        mask(kBlockRows),
        scores(kBlockRows * kTileTokens) {
    tile.q = q.data();
    tile.k = k.data();
    tile.v = v.data();
    tile.out = out.data();
    tile.row_max = row_max.data();
    tile.row_sum = row_sum.data();
    tile.scores = scores.data();
    tile.row_mask = nullptr;
    tile.soft_cap = 0.f;
    tile.k_stride = qk_channels;
    tile.v_stride = stride_of(v_channels);
    tile.out_stride = stride_of(v_channels);
    tile.qk_channels = qk_channels;
    tile.v_channels = v_channels;
    tile.rows = num_rows;
    tile.tokens = num_tokens;
    tile.capacity = kTileTokens;
  }
  static std::int64_t stride_of(std::int64_t channels) { return (channels + 15) / 16 * 16; }

  float& query(std::int64_t row, std::int64_t channel) {
    const std::int64_t vector = row / lanes;
    return q[static_cast<std::size_t>((vector * tile.qk_channels + channel) * lanes + row % lanes)];
  }
  float& key(std::int64_t token, std::int64_t channel) {
    return k[static_cast<std::size_t>(token * tile.k_stride + channel)];
  }
  float& value(std::int64_t token, std::int64_t channel) {
    return v[static_cast<std::size_t>(token * tile.v_stride + channel)];
  }
  const float* row(std::int64_t r) const {
    return &out[static_cast<std::size_t>(r * tile.out_stride)];
  }

  std::int64_t lanes;
  std::vector<float> q, k, v, out, row_max, row_sum;
  std::vector<std::uint64_t> mask;
  std::vector<float> scores;
  cpu::AttendTile tile;
};

float normal(std::uint64_t seed, std::int64_t a, std::int64_t b) {
  return static_cast<float>(
      random_normal(seed + static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
}

/// Bits of the first `count` tokens.
std::uint64_t first_tokens(std::int64_t count) {
  return count == 0 ? 0 : ~std::uint64_t{0} >> (64 - count);
}

class AttendKernel : public IsaTest {
 protected:
  /// Rows [first, first + count) of the same problem of kBlockRows rows, alone. Row r sees the
  /// tokens whose bit is set in `seen(r)`.
  template <class Seen>
  Block run(std::int64_t first, std::int64_t count, std::int64_t tokens, Seen&& seen,
            std::int64_t nan_token = -1) const {
    constexpr std::int64_t kQk = 40, kV = 72;
    Block block(kernels(), count, tokens, kQk, kV);
    bool border = false;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t c = 0; c < kQk; ++c) block.query(r, c) = normal(1, first + r, c);
      const std::uint64_t mask = seen(first + r) & first_tokens(tokens);
      block.mask[static_cast<std::size_t>(r)] = mask;
      border |= mask != first_tokens(tokens);
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float poison = t == nan_token ? std::numeric_limits<float>::quiet_NaN() : 0.f;
      for (std::int64_t c = 0; c < kQk; ++c) block.key(t, c) = normal(1000, t, c) + poison;
      for (std::int64_t c = 0; c < kV; ++c) block.value(t, c) = normal(2000, t, c) + poison;
    }
    if (border) block.tile.row_mask = block.mask.data();
    kernels().attend(block.tile);
    return block;
  }
};
FOVEA_FOR_EACH_ISA(AttendKernel);

TEST_P(AttendKernel, WeightsAreExp2WithinTwoUnitsInTheLastPlace) {
  // One channel: token 0 scores 0 and is the maximum, the others score x; values pick tokens.
  double worst = 0;
  for (int piece = 0; piece < 400; ++piece) {
    Block block(kernels(), 1, kTileTokens, 1, kTileTokens);
    block.query(0, 0) = 1.f;
    for (std::int64_t t = 0; t < kTileTokens; ++t) {
      const double x =
          -static_cast<double>(piece * kTileTokens + t) * (126.0 / (400 * 64)) * 0.9999;
      block.key(t, 0) = t == 0 ? 0.f : static_cast<float>(x);
      block.value(t, t) = 1.f;
    }
    kernels().attend(block.tile);
    for (std::int64_t t = 0; t < kTileTokens; ++t) {
      const double exact = std::exp2(static_cast<double>(block.key(t, 0)));
      worst = std::max(worst, std::abs(block.row(0)[t] - exact) / exact);
    }
    EXPECT_EQ(1.f, block.row(0)[0]);
  }
  EXPECT_LE(worst, 2 * 0x1p-23);
}

TEST_P(AttendKernel, WeightsBelowTheSmallestNormalNumberAreZero) {
  Block block(kernels(), 1, 5, 1, 5);
  block.query(0, 0) = 1.f;
  const float scores[] = {0.f, -126.5f, -1e4f, -3e38f, -std::numeric_limits<float>::infinity()};
  for (std::int64_t t = 0; t < 5; ++t) {
    block.key(t, 0) = scores[t];
    block.value(t, t) = 1.f;
  }
  kernels().attend(block.tile);
  EXPECT_EQ(1.f, block.row_sum[0]);
  for (std::int64_t t = 1; t < 5; ++t) EXPECT_EQ(0.f, block.row(0)[t]) << scores[t];
}

TEST_P(AttendKernel, BitsOfARowDoNotDependOnRowsBesideIt) {
  for (std::int64_t tokens : {1, 5, 11, 63, 64}) {
    // Everything, a causal border, a window, or scattered tokens as of a draft tree.
    const auto seen = [&](std::int64_t r) {
      const std::uint64_t causal = first_tokens(r * tokens / kBlockRows);
      if (r % 5 == 0) return first_tokens(tokens);
      if (r % 5 == 1) return causal & ~(causal >> 4);
      return r % 5 == 2 ? random_bits(7, static_cast<std::uint64_t>(r)) : causal;
    };
    const Block whole = run(0, kBlockRows, tokens, seen);
    for (std::int64_t first : {0, 1, 13, 60}) {
      for (std::int64_t count : {1, 2, 3, 4}) {
        const Block part = run(first, count, tokens, seen);
        for (std::int64_t r = 0; r < count; ++r) {
          EXPECT_EQ(0, std::memcmp(whole.row(first + r), part.row(r), 72 * sizeof(float)))
              << "row " << first + r << ", " << tokens << " tokens";
          EXPECT_EQ(whole.row_sum[static_cast<std::size_t>(first + r)],
                    part.row_sum[static_cast<std::size_t>(r)]);
        }
      }
    }
  }
}

TEST_P(AttendKernel, ANaNReachesTheRowsThatSeeItAndNoOther) {
  // Row r sees tokens [0, r]: the NaN of token 22 divides the block within a register tile of rows.
  const auto seen = [](std::int64_t r) { return first_tokens(r + 1); };
  const Block clean = run(0, kBlockRows, kTileTokens, seen);
  const Block block = run(0, kBlockRows, kTileTokens, seen, 22);
  for (std::int64_t r = 0; r < kBlockRows; ++r) {
    if (r < 22) {
      EXPECT_EQ(0, std::memcmp(clean.row(r), block.row(r), 72 * sizeof(float))) << "row " << r;
      continue;
    }
    EXPECT_TRUE(std::isnan(block.row_sum[static_cast<std::size_t>(r)])) << "row " << r;
    for (std::int64_t c = 0; c < 72; ++c) EXPECT_TRUE(std::isnan(block.row(r)[c])) << "row " << r;
  }
}

TEST_P(AttendKernel, RowsThatSeeNoTokenKeepTheirState) {
  const Block block = run(0, 9, 17, [](std::int64_t r) { return first_tokens(r == 4 ? 0 : 17); });
  EXPECT_EQ(-std::numeric_limits<float>::infinity(), block.row_max[4]);
  EXPECT_EQ(0.f, block.row_sum[4]);
  for (std::int64_t c = 0; c < 72; ++c) EXPECT_EQ(0.f, block.row(4)[c]);
}

TEST_P(AttendKernel, ScatteredTokensAreSeenByTheirRowsAlone) {
  // Hidden keys and values are NaN: a row's result is that of its own tokens, moved together.
  constexpr std::uint64_t kMask = 0x8421'0ff0'1234'5677;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Block block(kernels(), 1, kTileTokens, 40, 72);
  Block dense(kernels(), 1, std::popcount(kMask), 40, 72);
  block.mask[0] = kMask;
  block.tile.row_mask = block.mask.data();
  std::int64_t next = 0;
  for (std::int64_t c = 0; c < 40; ++c) block.query(0, c) = dense.query(0, c) = normal(1, 0, c);
  for (std::int64_t t = 0; t < kTileTokens; ++t) {
    const bool is_seen = (kMask >> t & 1) != 0;
    for (std::int64_t c = 0; c < 40; ++c) block.key(t, c) = is_seen ? normal(1000, t, c) : kNan;
    for (std::int64_t c = 0; c < 72; ++c) block.value(t, c) = is_seen ? normal(2000, t, c) : kNan;
    if (!is_seen) continue;
    for (std::int64_t c = 0; c < 40; ++c) dense.key(next, c) = block.key(t, c);
    for (std::int64_t c = 0; c < 72; ++c) dense.value(next, c) = block.value(t, c);
    ++next;
  }
  kernels().attend(block.tile);
  kernels().attend(dense.tile);
  EXPECT_EQ(dense.row_max[0], block.row_max[0]);
  EXPECT_EQ(0, std::memcmp(dense.row(0), block.row(0), 72 * sizeof(float)));
}

TEST_P(AttendKernel, SoftCapIsTanhWithinTwoUnitsOfTheCap) {
  // One channel, a query of 1: keys are scores, and the row's maximum says what became of one.
  const float cap = 21.f;
  for (float score : {-1e30f, -300.f, -21.f, -1.f, -1e-4f, 0.f, 1e-4f, 0.5f, 10.f, 30.f, 1e30f}) {
    Block block(kernels(), 1, 1, 1, 1);
    block.query(0, 0) = 1.f;
    block.key(0, 0) = score;
    block.tile.soft_cap = cap;
    kernels().attend(block.tile);
    const double exact = 21.0 * std::tanh(static_cast<double>(score) / 21.0);
    EXPECT_NEAR(exact, block.row_max[0], 21 * 0x1p-22) << score;
  }
}

}  // namespace
}  // namespace fovea::test
