// Attention over bf16 pairs on plain memory, where ops cannot look: where keys lie, halves of
// pairs, groups of channels, and bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend_cpu/cpu_test.h"
#include "backends/cpu/pair_state.h"
#include "fovea/workspace.h"
#include "support/compare.h"
#include "support/poison.h"

namespace fovea::test {
namespace {

using cpu::kPairTileTokens;

constexpr std::int64_t kRows = 50, kQk = 40, kV = 72;

BFloat16 bf16(std::uint64_t seed, std::int64_t a, std::int64_t b) {
  return from_float<BFloat16>(static_cast<float>(
      random_normal(seed + static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b))));
}

const std::byte* bytes_of(const BFloat16* row) { return reinterpret_cast<const std::byte*>(row); }

/// Rows of keys and values, some distance apart.
struct Operands {
  explicit Operands(std::int64_t num_tokens, std::int64_t k_stride = kQk)
      : tokens(num_tokens), stride(k_stride), k(static_cast<std::size_t>(num_tokens * k_stride)),
        v(static_cast<std::size_t>(num_tokens * kV)) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t c = 0; c < kQk; ++c) key(t)[c] = bf16(1000, t, c);
      for (std::int64_t c = 0; c < kV; ++c) value(t)[c] = bf16(2000, t, c);
    }
  }
  BFloat16* key(std::int64_t t) { return &k[static_cast<std::size_t>(t * stride)]; }
  BFloat16* value(std::int64_t t) { return &v[static_cast<std::size_t>(t * kV)]; }

  std::int64_t tokens;
  std::int64_t stride;
  std::vector<BFloat16> k, v;
};

/// Rows [first, first + count) of kRows queries, over one tile.
class PairState : public IsaTest {
 protected:
  static cpu::ChannelGroups one_group(std::int64_t channels) {
    return {.count = 1, .end = {channels}};
  }
  static cpu::AttendShape shape() {
    return {.qk_channels = kQk,
            .v_channels = kV,
            .max_rows = kRows,
            .score_factor = 0.2f,
            .k_groups = one_group(kQk),
            .v_groups = one_group(kV)};
  }
  struct Result {
    std::vector<float> out;  ///< [count][kV]
    std::vector<float> lse;
    const float* row(std::int64_t r) const { return &out[static_cast<std::size_t>(r * kV)]; }
  };

  /// `load(state)` gives the tile; row r sees the tokens t for which seen(r, t).
  template <class Load, class Seen>
  Result run(const cpu::AttendShape& shape, std::int64_t first, std::int64_t count,
             std::int64_t tokens, Load&& load, Seen&& seen) const {
    Workspace workspace;
    const std::int64_t bytes = cpu::PairState::bytes(kernels(), shape);
    workspace.reserve(bytes);
    WorkspaceScope scope(workspace);
    std::byte* memory = scope.take_bytes(bytes);
    std::memset(memory, 0xff, static_cast<std::size_t>(bytes));
    cpu::PairState state(kernels(), shape, memory);
    state.begin({.count = count});
    std::vector<std::uint64_t> masks(static_cast<std::size_t>(count) * 2);
    bool all = true;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t c = 0; c < kQk; ++c) {
        state.query_buffer()[c] = to_float(bf16(1, first + r, c));
      }
      state.set_query(r);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const bool sees = seen(first + r, t);
        all = all && sees;
        masks[static_cast<std::size_t>(r * 2 + t / 64)] |= std::uint64_t{sees} << t % 64;
      }
    }
    load(state);
    state.attend(0, count, tokens, all ? nullptr : masks.data());
    Result result;
    result.out.resize(static_cast<std::size_t>(count * kV));
    for (std::int64_t r = 0; r < count; ++r) {
      float* out = &result.out[static_cast<std::size_t>(r * kV)];
      result.lse.push_back(state.finish(r, cpu::row_of(out), cpu::kNoSink));
    }
    return result;
  }

  static auto loader(Operands& operands) {
    return [&operands](cpu::PairState& state) {
      const float one = 1.f;
      for (std::int64_t t = 0; t < operands.tokens; ++t) {
        state.set_key(t, bytes_of(operands.key(t)), &one);
        state.set_value(t, bytes_of(operands.value(t)), &one);
      }
      state.finish_load(operands.tokens, 0);
    };
  }
};

std::vector<Isa> isas_with_pairs() {
  std::vector<Isa> isas;
  for (Isa isa : available_isas()) {
    if (isa == Isa::scalar || isa == Isa::avx512_bf16) isas.push_back(isa);
  }
  return isas;
}
INSTANTIATE_TEST_SUITE_P(, PairState, ::testing::ValuesIn(isas_with_pairs()),
                         [](const ::testing::TestParamInfo<Isa>& param_info) {
                           return std::string(name_of(param_info.param));
                         });

bool sees_all(std::int64_t, std::int64_t) { return true; }

TEST_P(PairState, BitsOfARowDoNotDependOnRowsBesideIt) {
  for (std::int64_t tokens : {1, 2, 15, 16, 17, 63, 127, 128}) {
    Operands operands(tokens);
    const auto seen = [&](std::int64_t r, std::int64_t t) {
      if (r % 4 == 0) return true;
      if (r % 4 == 1) return t <= r;
      if (r % 4 == 2) return t > r;
      return (random_bits(7, static_cast<std::uint64_t>(r)) >> t % 64 & 1) != 0;
    };
    const Result whole = run(shape(), 0, kRows, tokens, loader(operands), seen);
    for (std::int64_t first : {0, 1, 13, 46}) {
      for (std::int64_t count : {1, 2, 3, 4}) {
        const Result part = run(shape(), first, count, tokens, loader(operands), seen);
        for (std::int64_t r = 0; r < count; ++r) {
          EXPECT_EQ(0, std::memcmp(whole.row(first + r), part.row(r), kV * sizeof(float)))
              << "row " << first + r << ", " << tokens << " tokens";
          EXPECT_EQ(whole.lse[static_cast<std::size_t>(first + r)],
                    part.lse[static_cast<std::size_t>(r)]);
        }
      }
    }
  }
}

TEST_P(PairState, BitsDoNotDependOnWhereKeysLie) {
  // One stride; a wider one; backwards; in pieces of 3; an odd number of bytes apart.
  constexpr std::int64_t kTokens = 100;
  Operands operands(kTokens);
  const Result expected = run(shape(), 0, kRows, kTokens, loader(operands), sees_all);
  const auto expect_same = [&](const char* what, auto&& place) {
    std::vector<std::byte> memory(static_cast<std::size_t>(kTokens * 200 + 1000), std::byte{0xff});
    const auto load = [&](cpu::PairState& state) {
      const float one = 1.f;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        auto* row = reinterpret_cast<BFloat16*>(memory.data() + place(t));
        std::memcpy(row, operands.key(t), kQk * sizeof(BFloat16));
        state.set_key(t, bytes_of(row), &one);
        state.set_value(t, bytes_of(operands.value(t)), &one);
      }
      state.finish_load(kTokens, 0);
    };
    const Result got = run(shape(), 0, kRows, kTokens, load, sees_all);
    EXPECT_EQ(0, std::memcmp(expected.out.data(), got.out.data(), expected.out.size() * 4)) << what;
  };
  expect_same("wide", [](std::int64_t t) { return t * 200; });
  expect_same("backwards", [](std::int64_t t) { return (kTokens - 1 - t) * 82; });
  expect_same("pieces", [](std::int64_t t) { return t * 82 + t / 3 * 6; });
}

TEST_P(PairState, ANaNReachesTheRowsThatSeeItAndNoOther) {
  // Row r sees tokens [0, r]: the first half of a pair is NaN, then the second.
  const auto seen = [](std::int64_t r, std::int64_t t) { return t <= r; };
  for (std::int64_t nan_token : {22, 23}) {
    for (bool in_key : {false, true}) {
      Operands clean(kRows), dirty(kRows);
      BFloat16* row = in_key ? dirty.key(nan_token) : dirty.value(nan_token);
      std::fill_n(row, in_key ? kQk : kV, BFloat16{0x7fc0});
      const Result expected = run(shape(), 0, kRows, kRows, loader(clean), seen);
      const Result got = run(shape(), 0, kRows, kRows, loader(dirty), seen);
      for (std::int64_t r = 0; r < kRows; ++r) {
        if (r < nan_token) {
          EXPECT_EQ(0, std::memcmp(expected.row(r), got.row(r), kV * sizeof(float))) << "row " << r;
          continue;
        }
        for (std::int64_t c = 0; c < kV; ++c) EXPECT_TRUE(std::isnan(got.row(r)[c])) << "row " << r;
      }
    }
  }
}

TEST_P(PairState, RowsThatSeeNoTokenAreEmpty) {
  Operands operands(33);
  const Result result = run(shape(), 0, 9, 33, loader(operands),
                            [](std::int64_t r, std::int64_t) { return r != 4; });
  EXPECT_EQ(-std::numeric_limits<float>::infinity(), result.lse[4]);
  for (std::int64_t c = 0; c < kV; ++c) EXPECT_EQ(0.f, result.row(4)[c]);
}

TEST_P(PairState, ScalesOfGroupsMultiplyTheirChannels) {
  // Powers of two: bits are those of keys and values that hold them already.
  constexpr std::int64_t kTokens = 77;
  Operands codes(kTokens), values(kTokens);
  cpu::AttendShape grouped = shape();
  grouped.k_groups = {.count = 3, .end = {6, 24, kQk}};
  grouped.v_groups = {.count = 2, .end = {32, kV}};
  const auto k_scale = [](std::int64_t t, int g) {
    return std::ldexp(1.f, static_cast<int>(t + g) % 3 - 2);
  };
  const auto v_scale = [](std::int64_t t, int g) {
    return std::ldexp(1.f, static_cast<int>(t + 2 * g) % 5 - 1);
  };
  const auto multiply = [](BFloat16* x, std::int64_t begin, std::int64_t end, float scale) {
    for (std::int64_t c = begin; c < end; ++c) x[c] = from_float<BFloat16>(to_float(x[c]) * scale);
  };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (int g = 0; g < 3; ++g) {
      multiply(values.key(t), g == 0 ? 0 : grouped.k_groups.end[g - 1], grouped.k_groups.end[g],
               k_scale(t, g));
    }
    for (int g = 0; g < 2; ++g) {
      multiply(values.value(t), g == 0 ? 0 : 32, grouped.v_groups.end[g], v_scale(t, g));
    }
  }
  const auto load = [&](cpu::PairState& state) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const float k_scales[] = {k_scale(t, 0), k_scale(t, 1), k_scale(t, 2)};
      const float v_scales[] = {v_scale(t, 0), v_scale(t, 1)};
      state.set_key(t, bytes_of(codes.key(t)), k_scales);
      state.set_value(t, bytes_of(codes.value(t)), v_scales);
    }
    state.finish_load(kTokens, 0);
  };
  const Result expected = run(shape(), 0, kRows, kTokens, loader(values), sees_all);
  const Result got = run(grouped, 0, kRows, kTokens, load, sees_all);
  // Sums go over other stretches: the f32 accumulation alone may differ.
  const TensorView out = TensorView::of(got.out.data(), {kRows, kV});
  EXPECT_TRUE(rows_close(std::vector<double>(expected.out.begin(), expected.out.end()), out,
                         {0x1p-8, 0}));
}

TEST_P(PairState, KeysOfInt8MeetAQueryInFixedPoint) {
  if (!kernels().pairs) GTEST_SKIP() << "no products of pairs";
  constexpr std::int64_t kTokens = 77, kValues = 32;
  Operands codes(kTokens);
  std::vector<std::int16_t> integers(static_cast<std::size_t>(kTokens * kQk));
  const auto integer = [&](std::int64_t t) { return &integers[static_cast<std::size_t>(t * kQk)]; };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t c = 0; c < kQk; ++c) {
      const auto code = static_cast<std::int16_t>((t * 37 + c * 101) % 255 - 127);
      integer(t)[c] = code;
      codes.key(t)[c] = from_float<BFloat16>(static_cast<float>(code));
    }
  }
  for (const bool in_keys : {false, true}) {
    SCOPED_TRACE(in_keys ? "values are in the keys" : "values of their own");
    cpu::AttendShape bf16_keys = shape();
    bf16_keys.values_in_keys = in_keys;
    if (in_keys) bf16_keys.v_channels = kValues;
    bf16_keys.k_groups = {.count = 2, .end = {kValues, kQk}};
    bf16_keys.v_groups = one_group(bf16_keys.v_channels);
    cpu::AttendShape int8_keys = bf16_keys;
    int8_keys.int8_keys = true;
    const auto load = [&](cpu::PairState& state) {
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const float scales[] = {0.02f + 0.0001f * static_cast<float>(t), 0.03f};
        const float one = 1.f;
        state.set_key(t, state.int8_keys() ? reinterpret_cast<const std::byte*>(integer(t))
                                           : bytes_of(codes.key(t)), scales);
        if (!in_keys) state.set_value(t, bytes_of(codes.value(t)), &one);
      }
      state.finish_load(kTokens, 0);
    };
    const Result expected = run(bf16_keys, 0, kRows, kTokens, load, sees_all);
    const Result got = run(int8_keys, 0, kRows, kTokens, load, sees_all);
    for (std::int64_t r = 0; r < kRows; ++r) {
      EXPECT_NEAR(expected.lse[static_cast<std::size_t>(r)], got.lse[static_cast<std::size_t>(r)],
                  0x1p-11) << "row " << r;
      for (std::int64_t c = 0; c < bf16_keys.v_channels; ++c) {
        ASSERT_NEAR(expected.row(r)[c], got.row(r)[c], 0x1p-6) << "row " << r << ", channel " << c;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
