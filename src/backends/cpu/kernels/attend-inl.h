// Scores, softmax and weighted values of a block of rows against a tile of keys.
// Included inside an instruction set's unit.
//
//   S[token][row] = K[token][:] . Q[:][row]          tokens x row vectors in registers
//   S             = soft cap of S, -inf where hidden
//   P             = 2^(S - max)                      row vector by row vector, lane-wise
//   O[row][:]     = O[row][:] * correction + P V     rows x channel vectors in registers
//
// Every sum runs over its index in order, whatever the register tile: a row's bits do not depend on
// the rows and tokens that it is computed with.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Channels of Q K^T at a time, so that two vectors of Q (2 x 288 x 32 bytes = 18 KiB for AVX2)
/// stay in a 32 KiB L1 while all tokens pass. 576 = 2 x 288.
constexpr std::int64_t kChannelChunk = 288;

/// The next smaller register tile for what a multiple of `n` leaves.
constexpr int next_smaller(int n) {
  int power = 1;
  while (2 * power < n) power *= 2;
  return power;
}

/// Channels [begin, end) of the scores of Tokens tokens and Vectors row vectors.
/// Registers: Tokens x Vectors sums, Vectors of Q, one broadcast of K.
template <int Tokens, int Vectors>
FOVEA_INLINE void score_tile(const AttendTile& tile, const float* q, const float* k, float* scores,
                             std::int64_t begin, std::int64_t end) {
  const std::int64_t q_stride = tile.qk_channels * kLanes;  // From a row vector to the next.
  constexpr std::int64_t scores_stride = kTileTokens * kLanes;
  Vec sum[Tokens][Vectors];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sum[t][j] = begin == 0 ? broadcast(0.f) : load(scores + j * scores_stride + t * kLanes);
    }
  }
  for (std::int64_t c = begin; c < end; ++c) {
    Vec q_c[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) q_c[j] = load(q + j * q_stride + c * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
      const Vec k_tc = broadcast(k[t * tile.k_stride + c]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[t][j] = fma(k_tc, q_c[j], sum[t][j]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(scores + j * scores_stride + t * kLanes, sum[t][j]);
  }
}

/// All tokens from `token` on, as many at a time as fit.
template <int Tokens, int Vectors>
void score_tokens(const AttendTile& tile, std::int64_t row_vector, std::int64_t token,
                  std::int64_t begin, std::int64_t end) {
  const float* q = tile.q + row_vector * tile.qk_channels * kLanes;
  float* scores = tile.scores + row_vector * kTileTokens * kLanes;
  for (; token + Tokens <= tile.tokens; token += Tokens) {
    score_tile<Tokens, Vectors>(tile, q, tile.k + token * tile.k_stride, scores + token * kLanes,
                                begin, end);
  }
  if constexpr (Tokens > 1) {
    if (token < tile.tokens) {
      score_tokens<next_smaller(Tokens), Vectors>(tile, row_vector, token, begin, end);
    }
  }
}

void score(const AttendTile& tile) {
  const std::int64_t row_vectors = (tile.rows + kLanes - 1) / kLanes;
  for (std::int64_t begin = 0; begin < tile.qk_channels; begin += kChannelChunk) {
    const std::int64_t rest = begin + kChannelChunk;
    const std::int64_t end = rest < tile.qk_channels ? rest : tile.qk_channels;
    std::int64_t j = 0;
    for (; j + kQkVectors <= row_vectors; j += kQkVectors) {
      score_tokens<kQkTokens, kQkVectors>(tile, j, 0, begin, end);
    }
    for (; j < row_vectors; ++j) score_tokens<kQkTokens, 1>(tile, j, 0, begin, end);
  }
}

/// out[Rows][Vectors * lanes] = out * correction + weights of tokens [begin, end) times values.
/// Registers: Rows x Vectors sums, Vectors of V, one broadcast of P.
template <int Rows, int Vectors>
FOVEA_INLINE void value_tile(const AttendTile& tile, const float* correction, const float* weights,
                             const float* v, float* out, std::int64_t begin, std::int64_t end) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sum[r][j] = mul(load(out + r * tile.out_stride + j * kLanes), broadcast(correction[r]));
    }
  }
  for (std::int64_t t = begin; t < end; ++t) {
    Vec v_t[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) v_t[j] = load(v + t * tile.v_stride + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec p = broadcast(weights[t * kLanes + r]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[r][j] = fma(p, v_t[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(out + r * tile.out_stride + j * kLanes, sum[r][j]);
  }
}

/// Where the segment of tokens from `token` on ends: all of its tokens are seen by the same rows.
template <int Rows>
FOVEA_INLINE std::int64_t segment_end(const AttendTile& tile, const std::uint64_t* seen,
                                      std::int64_t token) {
  std::uint64_t changes = 0;  // Bit t: some row sees one of tokens t and t + 1 alone.
  for (int r = 0; r < Rows; ++r) changes |= seen[r] ^ seen[r] >> 1;
  changes = changes >> token << token;
  const std::int64_t end = changes == 0 ? tile.tokens : __builtin_ctzll(changes) + 1;
  return end < tile.tokens ? end : tile.tokens;
}

/// A value is never multiplied by the weight 0 of a row that does not see it: it may be NaN. So
/// rows share the tokens that all of them see, and take the others of a border tile one by one, in
/// the order of the tokens all the same.
template <int Rows, int Vectors>
FOVEA_INLINE void value_rows(const AttendTile& tile, const float* correction, std::int64_t row,
                             std::int64_t channel) {
  const float* weights = tile.scores + row / kLanes * (kTileTokens * kLanes) + row % kLanes;
  const float* v = tile.v + channel;
  float* out = tile.out + row * tile.out_stride + channel;
  if (!tile.row_mask) {
    value_tile<Rows, Vectors>(tile, correction + row, weights, v, out, 0, tile.tokens);
    return;
  }
  value_tile<Rows, Vectors>(tile, correction + row, weights, v, out, 0, 0);
  float no_correction[Rows];
  for (int r = 0; r < Rows; ++r) no_correction[r] = 1.f;
  const std::uint64_t* seen = tile.row_mask + row;
  for (std::int64_t begin = 0; begin < tile.tokens;) {
    const std::int64_t end = segment_end<Rows>(tile, seen, begin);
    bool shared = true;
    for (int r = 0; r < Rows; ++r) shared = shared && (seen[r] >> begin & 1) != 0;
    if (shared) {
      value_tile<Rows, Vectors>(tile, no_correction, weights, v, out, begin, end);
    } else {
      for (int r = 0; r < Rows; ++r) {
        if ((seen[r] >> begin & 1) == 0) continue;
        value_tile<1, Vectors>(tile, no_correction, weights + r, v, out + r * tile.out_stride,
                               begin, end);
      }
    }
    begin = end;
  }
}

template <int Rows, int Vectors>
void value_panel(const AttendTile& tile, const float* correction, std::int64_t row,
                 std::int64_t channel) {
  for (; row + Rows <= tile.rows; row += Rows) {
    value_rows<Rows, Vectors>(tile, correction, row, channel);
  }
  if constexpr (Rows > 1) {
    if (row < tile.rows) value_panel<next_smaller(Rows), Vectors>(tile, correction, row, channel);
  }
}

/// A panel of V [tokens][Vectors * lanes] (64 x 96 bytes = 6 KiB for AVX2) stays in L1 while all
/// rows of the block pass.
void add_values(const AttendTile& tile, const float* correction) {
  const std::int64_t vectors = (tile.v_channels + kLanes - 1) / kLanes;
  std::int64_t j = 0;
  // A remainder of one vector would leave too few independent sums: 4 goes as 2 + 2, not 3 + 1.
  for (; vectors - j >= kPvVectors && vectors - j != kPvVectors + 1; j += kPvVectors) {
    value_panel<kPvRows, kPvVectors>(tile, correction, 0, j * kLanes);
  }
  for (; vectors - j >= 2; j += 2) value_panel<kPvRows, 2>(tile, correction, 0, j * kLanes);
  if (j < vectors) value_panel<kPvRows, 1>(tile, correction, 0, j * kLanes);
}

void attend(const AttendTile& tile) {
  score(tile);
  alignas(64) float correction[kBlockRows];
  weigh(tile, correction);
  add_values(tile, correction);
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
