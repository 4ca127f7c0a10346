// Scores of few rows from pairs of channels, as in dots-inl.h.
// Included inside an instruction set's unit that multiplies pairs.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Channels [c, c + 2 * kLanes) of a key, zeros behind its last.
FOVEA_INLINE Pairs load_key_pairs(const BFloat16* k, std::int64_t c, std::int64_t channels) {
  if (c + 2 * kLanes <= channels) return load_pairs(k + c);
  BFloat16 rest[2 * kLanes] = {};
  __builtin_memcpy(rest, k + c, static_cast<std::size_t>(channels - c) * sizeof(BFloat16));
  return load_pairs(rest);
}

/// Registers: Tokens x Rows sums, Rows of Q, one of K. Asks for the same lines of the rows that
/// come next.
template <int Rows, int Tokens, bool kAsks>
FOVEA_INLINE void dot_pair_tile(const PairTile& tile, std::int64_t row, std::int64_t token) {
  const std::uint32_t* q = tile.q + row * tile.q_stride;
  const KeyGroup& group = tile.k[token / kPairGroupTokens];
  const BFloat16* k = group.first + token % kPairGroupTokens * group.stride;
  Vec score[Tokens][Rows];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) score[t][r] = broadcast(0.f);
  }
  std::int64_t c = 0;
  for (int g = 0; g < tile.k_groups.count; ++g) {
    Vec sum[Tokens][Rows];
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[t][r] = broadcast(0.f);
    }
    for (; c < tile.k_groups.end[g]; c += 2 * kLanes) {
      Pairs q_c[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) q_c[r] = load_pairs(q + r * tile.q_stride + c / 2);
#pragma GCC unroll 16
      for (int t = 0; t < Tokens; ++t) {
        if constexpr (kAsks) {
          __builtin_prefetch(tile.next_keys[token + t] + 2 * c, 0, 2);
          if (tile.next_values) __builtin_prefetch(tile.next_values[token + t] + 2 * c, 0, 2);
        }
        const Pairs k_t = load_key_pairs(k + t * group.stride, c, tile.qk_channels);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sum[t][r] = dot_pairs(sum[t][r], q_c[r], k_t);
      }
    }
    const float* scales = tile.k_scales + g * tile.capacity + token;
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        score[t][r] = fma(sum[t][r], broadcast(scales[t]), score[t][r]);
      }
    }
  }
  store_dots<Rows, Tokens>(tile, row, token, score);
}

template <int Rows>
void dot_pair_tokens(const PairTile& tile, std::int64_t row) {
  constexpr int kTokens = kPairSums / Rows;
  static_assert(kPairGroupTokens % kTokens == 0);
  for (std::int64_t t = 0; t < tile.tokens; t += kTokens) {
    if (tile.next_keys && row == 0) {
      dot_pair_tile<Rows, kTokens, true>(tile, row, t);
    } else {
      dot_pair_tile<Rows, kTokens, false>(tile, row, t);
    }
  }
}

void score_few_pair_rows(const PairTile& tile) {
  std::int64_t row = 0;
  for (; row + 4 <= tile.rows; row += 4) dot_pair_tokens<4>(tile, row);
  for (; row + 2 <= tile.rows; row += 2) dot_pair_tokens<2>(tile, row);
  if (row < tile.rows) dot_pair_tokens<1>(tile, row);
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
