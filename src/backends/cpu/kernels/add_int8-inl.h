// Weights times values stored as int8, few rows per key head, weights in fixed point.
// Included inside an instruction set's unit, after in_place-inl.h.
//
//   O[row][:] = O[row][:] * correction + step[row] * (P V)[row][:]        lanes are channels
//
// A row's weights in a tile, each times its value's scale, are multiples of 1/32767 of the largest.
// Pairs of tokens meet pairs of weights, and sums over the tile are exact, so that their order is
// free and a weight of 0 hides whatever a value is.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Weights of a tile against a group of the values.
struct FixedWeights {
  alignas(64) std::int32_t pairs[kBlockRows * kTileTokens / 2];  ///< [row vectors][pairs][lanes]
  alignas(64) float steps[kBlockRows];  ///< What they count.
  const float* correction;              ///< [rows] what the sums so far shrink by.
  const std::int32_t* of(std::int64_t row) const {
    return pairs + row / kLanes * (kTileTokens / 2 * kLanes) + row % kLanes;
  }
};

/// Weights that their rows must not see: 0 times the scale of such a token may be NaN.
void hide_weights(const InPlaceTile& tile, float* weights) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    float* of_row = weights + row / kLanes * (kTileTokens * kLanes) + row % kLanes;
    for (std::int64_t t = 0; t < tile.tokens; ++t) {
      if ((tile.row_mask[row] >> t & 1) == 0) of_row[t * kLanes] = 0.f;
    }
  }
}

/// Pairs of int16 nearest to numbers between -2^15 and 2^15, anything where these are NaN.
FOVEA_INLINE IntVec join_rounded(Vec first, Vec second) {
  const Vec shift = broadcast(0x1.8p23f);  // The sum's lowest bits are the integer.
  const IntVec low = (IntVec)add(first, shift), high = (IntVec)add(second, shift);
  return (low & 0xffff) | (high << 16);
}

/// Weights [kTileTokens][lanes] of a row vector, 0 behind the last token, as multiples of what is
/// returned, which is NaN where one is not finite.
FOVEA_INLINE Vec fix_weights(const float* weights, std::int32_t* pairs) {
  IntVec bits = (IntVec)broadcast(0x1p-100f);  // Below, steps would be subnormal.
  for (std::int64_t t = 0; t < kTileTokens; ++t) {
    // Magnitudes are in the order of their bits, NaN behind infinity.
    const IntVec magnitude = (IntVec)load(weights + t * kLanes) & 0x7fffffff;
    bits = magnitude > bits ? magnitude : bits;
  }
  constexpr float kLimit = 32767.f;
  const Vec largest = (Vec)bits;
  const Vec inverse = div(broadcast(kLimit), largest);
  for (std::int64_t t = 0; t < kTileTokens; t += 2) {
    const Vec first = mul(load(weights + t * kLanes), inverse);
    const Vec second = mul(load(weights + (t + 1) * kLanes), inverse);
    const IntVec pair = join_rounded(first, second);
    __builtin_memcpy(pairs + t / 2 * kLanes, &pair, sizeof pair);
  }
  const Vec zero_or_nan = sub(largest, largest);
  return add(mul(largest, broadcast(1.f / kLimit)), zero_or_nan);
}

/// Of all rows against a group.
void fix_weights(const InPlaceTile& tile, int group, FixedWeights& fixed, RowsAhead& next) {
  alignas(64) float scaled[kBlockRows * kTileTokens];
  scale_weights(tile, group, scaled, next);
  for (std::int64_t row = 0; row < tile.rows; row += kLanes) {
    float* end = scaled + row * kTileTokens + tile.tokens * kLanes;
    for (std::int64_t t = tile.tokens; t < kTileTokens; ++t, end += kLanes) {
      store(end, broadcast(0.f));
    }
  }
  if (tile.row_mask) hide_weights(tile, scaled);
  for (std::int64_t row = 0; row < tile.rows; row += kLanes) {
    store(fixed.steps + row,
          fix_weights(scaled + row * kTileTokens, fixed.pairs + row * (kTileTokens / 2)));
  }
}

/// 2 * kLanes channels from `channel` on, of which `count` are the group's.
template <bool whole>
FOVEA_INLINE IntPairs load_codes_of(const std::byte* head, std::int64_t channel,
                                    std::int64_t count) {
  const auto* codes = reinterpret_cast<const std::int8_t*>(head) + channel;
  if constexpr (whole) return load_int_pairs(codes);
  std::int8_t some[2 * kLanes] = {};
  __builtin_memcpy(some, codes, static_cast<std::size_t>(count));
  return load_int_pairs(some);
}

/// out = out * correction + sums * step, `count` lanes of it: a step that is NaN is not that of the
/// channels behind.
template <bool whole>
FOVEA_INLINE void add_to(float* out, Vec correction, Vec sums, Vec step, std::int64_t count) {
  const Vec total = fma(sums, step, mul(load(out), correction));
  if (whole || count >= kLanes) {
    store(out, total);
  } else {
    store_partial(out, total, count);
  }
}

/// out[Rows][Vectors * lanes] += weights times values of all tokens. Of the last two vectors, those
/// that `count` channels reach into. Registers: Rows x Vectors sums, two of V, one broadcast of P.
/// A function of its own, as what surrounds it would take registers.
template <int Rows, int Vectors, bool whole>
[[gnu::noinline]] void add_int8_tile(const InPlaceTile& tile, std::int64_t head,
                                     std::int64_t row, std::int64_t channel, std::int64_t count,
                                     const FixedWeights& weights, RowsAhead& next) {
  const std::int64_t head_at = tile.v.offset_of(head);
  const std::int32_t* p = weights.of(row);
  IntVec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[r][j] = broadcast_int(0);
  }
  RowsAhead ahead = next;  // In registers.
  for (std::int64_t t = 0; t < tile.tokens; t += 2, p += kLanes) {
    // An eighth less than is read here: the scales per token have asked for as much and more.
    if (t % 16 != 0) ahead.ask<2 * Vectors * kLanes>();
    const std::byte *a = tile.v.rows[t] + head_at, *b = tile.v.rows[t + 1] + head_at;
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j += 2) {
      IntPairs v[2];
      interleave(load_codes_of<whole>(a, channel + j * kLanes, count),
                 load_codes_of<whole>(b, channel + j * kLanes, count), &v[0], &v[1]);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const IntPairs p_r = (IntPairs)broadcast_int(p[r]);
        sum[r][j] = dot_int_pairs(sum[r][j], v[0], p_r);
        sum[r][j + 1] = dot_int_pairs(sum[r][j + 1], v[1], p_r);
      }
    }
  }
  next = ahead;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const Vec step = broadcast(weights.steps[row + r]);
    const Vec correction = broadcast(weights.correction[row + r]);
    float* out = tile.out + (row + r) * tile.out_stride + channel;
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j += 2, out += 2 * kLanes) {
      Vec low = to_f32(sum[r][j]), high = to_f32(sum[r][j + 1]);
      restore_order(&low, &high);
      add_to<whole>(out, correction, low, step, count);
      if (whole || count > kLanes) {
        add_to<whole>(out + kLanes, correction, high, step, count - kLanes);
      }
    }
  }
}

/// Rows from `row` on of a head, and channels [channel, end) of a group.
template <int Rows>
void add_int8_rows(const InPlaceTile& tile, std::int64_t head, std::int64_t row,
                   std::int64_t channel, std::int64_t end, const FixedWeights& weights,
                   RowsAhead& next) {
  constexpr int kVectors = kDotSums / Rows;
  for (; end - channel >= kVectors * kLanes; channel += kVectors * kLanes) {
    add_int8_tile<Rows, kVectors, true>(tile, head, row, channel, 0, weights, next);
  }
  for (; end - channel >= 2 * kLanes; channel += 2 * kLanes) {
    add_int8_tile<Rows, 2, true>(tile, head, row, channel, 0, weights, next);
  }
  if (channel < end) {
    add_int8_tile<Rows, 2, false>(tile, head, row, channel, end - channel, weights, next);
  }
}

/// All rows of a head.
void add_int8_head(const InPlaceTile& tile, std::int64_t head, const FixedWeights* weights,
                   RowsAhead& next) {
  std::int64_t channel = 0;
  for (int g = 0; g < tile.v.groups.count; ++g, ++weights) {
    const std::int64_t end = tile.v.groups.end[g];
    std::int64_t row = head * tile.head_stride;
    const std::int64_t last = row + tile.head_rows;
    for (; row + 4 <= last; row += 4) {
      add_int8_rows<4>(tile, head, row, channel, end, *weights, next);
    }
    for (; row + 2 <= last; row += 2) {
      add_int8_rows<2>(tile, head, row, channel, end, *weights, next);
    }
    if (row < last) add_int8_rows<1>(tile, head, row, channel, end, *weights, next);
    channel = end;
  }
}

void add_int8_in_place(const InPlaceTile& tile, const float* correction) {
  RowsAhead next = keys_ahead(tile);
  FixedWeights weights[ChannelGroups::kMax];
  for (int g = 0; g < tile.v.groups.count; ++g) {
    weights[g].correction = correction;
    fix_weights(tile, g, weights[g], next);
  }
  for (std::int64_t head = 0; head < tile.heads; ++head) add_int8_head(tile, head, weights, next);
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
