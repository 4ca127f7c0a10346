// Scores of few rows: lanes are channels.
// Included inside an instruction set's unit.
//
// A query head that shares its keys with few others would leave most lanes of a row vector empty.
// Its scores are dot products instead: sums over the channels lane by lane, then over the lanes.
// They go where those of row vectors go, [row vectors][capacity][lanes].

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// sum[t][r] over its lanes becomes the score of row `row` + r and token `token` + t.
template <int Rows, int Tokens>
FOVEA_INLINE void store_dots(const ScoreBlock& block, std::int64_t row, std::int64_t token,
                             const Vec (&sum)[Tokens][Rows]) {
  float* scores =
      block.scores + (row / kLanes * block.capacity + token) * kLanes + row % kLanes;
  if constexpr (Rows == 4) {
    for (int t = 0; t < Tokens; ++t) {
      reduce_add4(sum[t][0], sum[t][1], sum[t][2], sum[t][3], scores + t * kLanes);
    }
  } else {
    static_assert(Tokens % 4 == 0);
    for (int r = 0; r < Rows; ++r) {
      for (int t = 0; t < Tokens; t += 4) {
        float dots[4];
        reduce_add4(sum[t][r], sum[t + 1][r], sum[t + 2][r], sum[t + 3][r], dots);
        for (int i = 0; i < 4; ++i) scores[(t + i) * kLanes + r] = dots[i];
      }
    }
  }
}

/// Registers: Tokens x Rows sums, Rows of Q, one of K.
template <int Rows, int Tokens>
FOVEA_INLINE void dot_tile(const AttendTile& tile, std::int64_t row, std::int64_t token) {
  const float* q = tile.q + row * tile.q_stride;
  const float* k = tile.k + token * tile.k_stride;
  Vec sum[Tokens][Rows];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sum[t][r] = broadcast(0.f);
  }
  for (std::int64_t c = 0; c < tile.qk_channels; c += kLanes) {
    Vec q_c[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) q_c[r] = load(q + r * tile.q_stride + c);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
      const Vec k_t = load(k + t * tile.k_stride + c);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[t][r] = fma(k_t, q_c[r], sum[t][r]);
    }
  }
  store_dots<Rows, Tokens>(tile, row, token, sum);
}

/// Whole register tiles of tokens: nobody looks at those behind the last.
template <int Rows>
void dot_tokens(const AttendTile& tile, std::int64_t row) {
  constexpr int kTokens = kDotSums / Rows;
  for (std::int64_t t = 0; t < tile.tokens; t += kTokens) dot_tile<Rows, kTokens>(tile, row, t);
}

void score_few_rows(const AttendTile& tile) {
  std::int64_t row = 0;
  for (; row + 4 <= tile.rows; row += 4) dot_tokens<4>(tile, row);
  for (; row + 2 <= tile.rows; row += 2) dot_tokens<2>(tile, row);
  if (row < tile.rows) dot_tokens<1>(tile, row);
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
