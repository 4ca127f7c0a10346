// Scores, softmax and weighted values of a block of rows against a tile of bf16 keys.
// Included inside an instruction set's unit that multiplies pairs.
//
//   S[token][row] = K[token][pairs of channels] . Q[pairs of channels][row], group by group times
//                   the token's scale of the group
//   P             = softmax-inl.h
//   P[tokens / 2][row] = P rounded to bf16 once multiplied by the token's scale of the values
//   O[row][:]     = O[row][:] * correction + P[pairs of tokens] V[pairs of tokens][:]
//
// Keys are read where they lie: a pair of channels is broadcast to all rows. Values are rearranged
// once for all rows, by pack_values. Keys that were stored as int8 meet a query in fixed point, and
// their products add up exactly.
//
// Every sum runs over its index in order, whatever the register tile: a row's bits do not depend on
// the rows that it is computed with.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Pairs of Q K^T at a time, so that two vectors of Q (2 x 144 x 64 bytes = 18 KiB) stay in L1
/// while all tokens pass. 576 channels = 2 x 144 pairs.
constexpr std::int64_t kPairChunk = 144;

FOVEA_INLINE std::uint32_t pair_at(const std::byte* p) {
  std::uint32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return pair;
}

/// Asks for a cache line of the rows that come next, one in an iteration over the pairs of 16 rows:
/// a row of 16 pairs is a line. All at once would wait for each other.
struct NextRows {
  const std::byte* const* keys;
  const std::byte* const* values;
  template <int Tokens>
  FOVEA_INLINE void ask(std::int64_t token, std::int64_t pair) const {
    const std::int64_t row = pair % kPairGroupTokens;
    if (row >= Tokens) return;
    const std::int64_t byte = pair / kPairGroupTokens * 64;
    __builtin_prefetch(keys[token + row] + byte, 0, 2);
    if (values) __builtin_prefetch(values[token + row] + byte, 0, 2);
  }
};

/// Where a register tile of scores is: pairs [begin, end) of one group of channels.
struct PairSpan {
  std::int64_t begin;
  std::int64_t end;
  const float* scales;  ///< [capacity]
};

FOVEA_INLINE void set_zero(Vec& sum) { sum = broadcast(0.f); }
FOVEA_INLINE void set_zero(IntVec& sum) { sum = broadcast_int(0); }

/// What a row vector's sums count, besides the scales of keys.
FOVEA_INLINE Vec scaled(Vec sum, Vec scale, const float*) { return mul(sum, scale); }
FOVEA_INLINE Vec scaled(IntVec sum, Vec scale, const float* steps) {
  return mul(to_f32(sum), mul(scale, load(steps)));
}

/// Scores of Tokens tokens and Vectors row vectors from the pairs of a span, whose products add up
/// to a Sum. Registers: Tokens x Vectors sums, Vectors of Q, one broadcast of K.
template <class Sum, int Tokens, int Vectors, bool kAsks>
FOVEA_INLINE void score_pairs(const PairTile& tile, std::int64_t row_vector, std::int64_t token,
                              const PairSpan& span) {
  const std::int64_t q_stride = tile.qk_channels / 2 * kLanes;  // From a row vector to the next.
  const std::int64_t s_stride = tile.capacity * kLanes;
  const std::uint32_t* q = tile.q + row_vector * q_stride;
  const KeyGroup& group = tile.k[token / kPairGroupTokens];
  const std::int64_t k_stride = group.stride;
  const std::byte* k = group.first + token % kPairGroupTokens * k_stride;
  float* scores = tile.scores + row_vector * s_stride + token * kLanes;
  const NextRows next{tile.next_keys, tile.next_values};
  Sum sum[Tokens][Vectors];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) set_zero(sum[t][j]);
  }
  for (std::int64_t c = span.begin; c < span.end; ++c) {
    if constexpr (kAsks) next.ask<Tokens>(token, c);
    Pairs q_c[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) q_c[j] = load_pairs(q + j * q_stride + c * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
      const Pairs k_tc = broadcast_pair(pair_at(k + t * k_stride + 4 * c));
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) sum[t][j] = dot_pairs(sum[t][j], q_c[j], k_tc);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
    const Vec scale = broadcast(span.scales[token + t]);
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      float* s = scores + j * s_stride + t * kLanes;
      const Vec score = scaled(sum[t][j], scale, tile.q_steps + (row_vector + j) * kLanes);
      store(s, span.begin == 0 ? score : add(score, load(s)));
    }
  }
}

/// All tokens, in whole register tiles: those behind the last are computed from what lies there,
/// and nobody looks at them.
template <class Sum, int Vectors>
void score_span(const PairTile& tile, std::int64_t row_vector, const PairSpan& span) {
  constexpr int kTokens = kPairSums / Vectors;
  static_assert(kPairGroupTokens % kTokens == 0);
  const bool asks = tile.next_keys != nullptr && row_vector == 0;
  for (std::int64_t t = 0; t < tile.tokens; t += kTokens) {
    if (asks) {
      score_pairs<Sum, kTokens, Vectors, true>(tile, row_vector, t, span);
    } else {
      score_pairs<Sum, kTokens, Vectors, false>(tile, row_vector, t, span);
    }
  }
}

template <class Sum>
void score_pair_tile(const PairTile& tile) {
  const std::int64_t row_vectors = (tile.rows + kLanes - 1) / kLanes;
  std::int64_t begin = 0;
  for (int g = 0; g < tile.k_groups.count; ++g) {
    const std::int64_t group_end = tile.k_groups.end[g] / 2;
    while (begin < group_end) {
      const std::int64_t rest = begin + kPairChunk;
      const PairSpan span{begin, rest < group_end ? rest : group_end,
                          tile.k_scales + g * tile.capacity};
      std::int64_t j = 0;
      for (; j + 2 <= row_vectors; j += 2) score_span<Sum, 2>(tile, j, span);
      if (j < row_vectors) score_span<Sum, 1>(tile, j, span);
      begin = span.end;
    }
  }
}

/// Weights of the block times their tokens' `scales`, rounded, in pairs of tokens. A token behind
/// the last has weight 0.
void pack_weights(const PairTile& tile, const float* scales) {
  const std::int64_t row_vectors = (tile.rows + kLanes - 1) / kLanes;
  for (std::int64_t j = 0; j < row_vectors; ++j) {
    const float* weights = tile.scores + j * tile.capacity * kLanes;
    std::uint32_t* pairs = tile.weights + j * (tile.capacity / 2) * kLanes;
    for (std::int64_t t = 0; t < tile.tokens; t += 2) {
      const Vec first = mul(load(weights + t * kLanes), broadcast(scales[t]));
      Vec second = broadcast(0.f);
      if (t + 1 < tile.tokens) {
        second = mul(load(weights + (t + 1) * kLanes), broadcast(scales[t + 1]));
      }
      store_pairs(pairs + t / 2 * kLanes, round_to_pairs(first, second));
    }
  }
}

/// out[Rows][Vectors * lanes] = out * correction + weights times values. Registers: Rows x Vectors
/// sums, Vectors of V, one broadcast of P.
template <int Rows, int Vectors>
FOVEA_INLINE void value_pairs(const PairTile& tile, const float* correction, std::int64_t row,
                              std::int64_t channel) {
  const std::uint32_t* weights =
      tile.weights + row / kLanes * (tile.capacity / 2 * kLanes) + row % kLanes;
  const std::uint32_t* v = tile.v + channel;
  float* out = tile.out + row * tile.out_stride + channel;
  const std::int64_t pairs = (tile.tokens + 1) / 2;
  Vec sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sum[r][j] = mul(load(out + r * tile.out_stride + j * kLanes), broadcast(correction[row + r]));
    }
  }
  for (std::int64_t p = 0; p < pairs; ++p) {
    Pairs v_p[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) v_p[j] = load_pairs(v + p * tile.v_stride + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Pairs w = broadcast_pair(weights[p * kLanes + r]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[r][j] = dot_pairs(sum[r][j], w, v_p[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(out + r * tile.out_stride + j * kLanes, sum[r][j]);
  }
}

/// Rows of a register tile lie in one row vector: its rows divide the lanes.
template <int Rows, int Vectors>
void value_pair_panel(const PairTile& tile, const float* correction, std::int64_t row,
                      std::int64_t channel) {
  static_assert(kLanes % Rows == 0);
  for (; row + Rows <= tile.rows; row += Rows) {
    value_pairs<Rows, Vectors>(tile, correction, row, channel);
  }
  if constexpr (Rows > 1) {
    if (row < tile.rows) value_pair_panel<Rows / 2, Vectors>(tile, correction, row, channel);
  }
}

/// Channels [begin, end), whole vectors of them: a panel of V [tokens / 2][Vectors * lanes] (64 x
/// 192 bytes = 12 KiB) stays in L1 while all rows of the block pass.
void add_pair_values(const PairTile& tile, const float* correction, std::int64_t begin,
                     std::int64_t end) {
  for (; end - begin >= kPairPvVectors * kLanes; begin += kPairPvVectors * kLanes) {
    value_pair_panel<kPairPvRows, kPairPvVectors>(tile, correction, 0, begin);
  }
  for (; end - begin >= 2 * kLanes; begin += 2 * kLanes) {
    value_pair_panel<kPairPvRows, 2>(tile, correction, 0, begin);
  }
  if (begin < end) value_pair_panel<kPairPvRows, 1>(tile, correction, 0, begin);
}

/// The same for rows that do not see all tokens, some of whose values or scales are not finite: 0
/// times such a one would be NaN. A token that a row does not see is a 0 in both its pairs.
void add_seen_values(const PairTile& tile, const float* correction, std::int64_t begin,
                     std::int64_t end) {
  const std::int64_t words = tile.capacity / 64;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::uint64_t* seen = tile.row_mask + r * words;
    const std::uint32_t* weights =
        tile.weights + r / kLanes * (tile.capacity / 2 * kLanes) + r % kLanes;
    float* out = tile.out + r * tile.out_stride;
    for (std::int64_t c = begin; c < end; c += kLanes) {
      Vec sum = mul(load(out + c), broadcast(correction[r]));
      for (std::int64_t t = 0; t < tile.tokens; t += 2) {
        const std::uint64_t both = seen[t / 64] >> t % 64 & 3;
        const std::uint32_t halves = (both & 1 ? 0xffffu : 0u) | (both & 2 ? 0xffff0000u : 0u);
        const Pairs v = load_pairs(tile.v + t / 2 * tile.v_stride + c) & broadcast_pair(halves);
        sum = dot_pairs(sum, broadcast_pair(weights[t / 2 * kLanes] & halves), v);
      }
      store(out + c, sum);
    }
  }
}

void attend_pairs(const PairTile& tile) {
  if (tile.q_steps) {
    score_pair_tile<IntVec>(tile);
  } else {
    score_pair_tile<Vec>(tile);
  }
  alignas(64) float correction[kBlockRows];
  weigh(tile, correction);
  std::int64_t begin = 0;
  for (int g = 0; g < tile.v_groups.count; ++g) {
    // The last group ends at the last channel, which may lie in the second of interleave's vectors.
    const std::int64_t end = (tile.v_groups.end[g] + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    pack_weights(tile, tile.v_scales + g * tile.capacity);
    if (tile.row_mask && !tile.v_is_finite) {
      add_seen_values(tile, correction, begin, end);
    } else {
      add_pair_values(tile, correction, begin, end);
    }
    begin = end;
  }
}

/// Channels [c, c + count) of two bytes of a row of values, or zeros, up to 2 * kLanes.
FOVEA_INLINE void copy_channels(const std::byte* row, std::int64_t c, std::int64_t count,
                                std::uint16_t* dst) {
  for (int i = 0; i < 2 * kLanes; ++i) dst[i] = 0;
  if (row) __builtin_memcpy(dst, row + 2 * c, static_cast<std::size_t>(2 * count));
}

template <bool kInt16>
bool pack_values(const std::byte* const* rows, std::int64_t tokens, std::int64_t num_channels,
                 std::int64_t stride, std::uint32_t* pairs) {
  constexpr std::int64_t kChannels = 2 * kLanes;
  Pairs exponents = broadcast_pair(0);
  for (std::int64_t t = 0; t < tokens; t += 2) {
    const std::byte* a = rows[t];
    const std::byte* b = t + 1 < tokens ? rows[t + 1] : nullptr;
    std::uint32_t* dst = pairs + t / 2 * stride;
    for (std::int64_t c = 0; c < num_channels; c += kChannels) {
      Pairs low, high;
      if (a && b && c + kChannels <= num_channels) {
        interleave(a + 2 * c, b + 2 * c, &low, &high);
      } else {
        const std::int64_t count = num_channels - c < kChannels ? num_channels - c : kChannels;
        std::uint16_t copies[2][kChannels];
        copy_channels(a, c, count, copies[0]);
        copy_channels(b, c, count, copies[1]);
        interleave(copies[0], copies[1], &low, &high);
      }
      if constexpr (kInt16) low = bf16_of_int16(low), high = bf16_of_int16(high);
      store_pairs(dst + c, low);
      store_pairs(dst + c + kLanes, high);
      if constexpr (!kInt16) exponents = larger_exponents(larger_exponents(exponents, low), high);
    }
  }
  return !any_not_finite(exponents);
}

void restore_channels(std::int64_t num_channels, float* row) {
  for (std::int64_t c = 0; c < num_channels; c += 2 * kLanes) {
    Vec low = load(row + c);
    Vec high = load(row + c + kLanes);
    restore_order(&low, &high);
    store(row + c, low);
    store(row + c + kLanes, high);
  }
}

void widen_to_int16(const void* src, std::int64_t n, std::int16_t* dst) {
  const auto* from = static_cast<const std::int8_t*>(src);
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) store(dst + i, load_int_pairs(from + i));
  if (i == n) return;
  std::int8_t rest[2 * kLanes] = {};
  __builtin_memcpy(rest, from + i, static_cast<std::size_t>(n - i));
  store(dst + i, load_int_pairs(rest));
}

template <class T>
void widen(const void* src, std::int64_t n, BFloat16* dst) {
  const T* from = static_cast<const T*>(src);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(from + i));
  if (i < n) store(dst + i, load_partial(from + i, n - i));
}

void widen_nibbles(const void* src, std::int64_t n, BFloat16* dst) {
  const std::uint8_t* from = static_cast<const std::uint8_t*>(src);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, unpack_nibbles(from + i / 2));
  if (i == n) return;
  std::uint8_t rest[kLanes / 2] = {};
  __builtin_memcpy(rest, from + i / 2, static_cast<std::size_t>((n - i) / 2));
  store(dst + i, unpack_nibbles(rest));
}

std::int64_t multiply_add_pair_rounds(std::int64_t rounds, float* sink) {
  Vec sum[kPairSums];
#pragma GCC unroll 32
  for (int i = 0; i < kPairSums; ++i) sum[i] = broadcast(static_cast<float>(i));
  const Pairs factor = broadcast_pair(__builtin_bit_cast(std::uint32_t, *sink));
  for (std::int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kPairSums; ++i) sum[i] = dot_pairs(sum[i], factor, factor);
  }
  Vec total = sum[0];
#pragma GCC unroll 32
  for (int i = 1; i < kPairSums; ++i) total = add(total, sum[i]);
  *sink = reduce_add(total);
  return rounds * kPairSums * kLanes * 4;
}

constexpr PairKernels kPairKernels = {
    2 * kLanes,
    pack_values<false>,
    pack_values<true>,
    restore_channels,
    attend_pairs,
    {widen<Float8E4M3FN>, widen<Float8E5M2>, widen<std::int8_t>, widen_nibbles},
    widen_to_int16,
    multiply_add_pair_rounds,
};

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
