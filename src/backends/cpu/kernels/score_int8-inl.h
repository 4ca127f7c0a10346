// Scores of few rows per key head from keys stored as int8 and queries in fixed point.
// Included inside an instruction set's unit, after in_place-inl.h.
//
//   S[row][token] = K[token][:] . Q[row][:]        lanes are tokens
//
// Keys of as many tokens as a vector has lanes are transposed, four channels of a token in a lane,
// and meet broadcasts of the query: no sum is left within a vector, and the scales of tokens are a
// vector too. Products are exact, so that their order is free.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Channels of a vector of codes: four in a lane.
constexpr std::int64_t kQuadChannels = kKeyQuad * kLanes;
/// Vectors of tokens that share broadcasts of the query.
constexpr int kColumnVectors = 2;
constexpr std::int64_t kColumnTokens = kColumnVectors * kLanes;
static_assert(kStripTokens % kColumnTokens == 0);
/// Channels that are transposed before they are multiplied: 8 KiB of pairs of 32 tokens.
constexpr std::int64_t kColumnChannels = 2 * kQuadChannels;

/// Keys of kColumnTokens tokens, transposed: of each quad of channels the even pair, then the odd.
struct KeyColumns {
  IntPairs pairs[2 * kColumnChannels / kKeyQuad][kColumnVectors];
  std::int64_t quads = 0;
  FOVEA_INLINE void put(std::int64_t quad, int vector, IntVec codes) {
    pairs[2 * quad][vector] = ((IntPairs)codes << 8) >> 8;
    pairs[2 * quad + 1][vector] = (IntPairs)codes >> 8;
  }
};

/// Channels [c, c + kQuadChannels) of kLanes heads. Asks for half of what comes, products for the
/// other half: too much at once would hold up the loads here. A function of its own, as
/// score_columns is: what surrounds it would take registers from the transpose.
[[gnu::noinline]] void transpose_whole(const std::byte* const* heads, std::int64_t c,
                                       std::int64_t quad, int vector, KeyColumns& columns,
                                       RowsAhead& next) {
  IntVec codes[kLanes];
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) __builtin_memcpy(&codes[t], heads[t] + c, sizeof codes[t]);
  RowsAhead ahead = next;  // In registers.
  for_each_column(codes, [&](int i, IntVec column) __attribute__((always_inline)) {
    if (i % 2 == 0) ahead.ask<kQuadChannels>();
    columns.put(quad + i, vector, column);
  });
  next = ahead;
}

/// The last channels [c, end) of kLanes heads, less than a vector of them.
[[gnu::noinline]] void transpose_rest(const std::byte* const* heads, std::int64_t c,
                                      std::int64_t end, std::int64_t quad, int vector,
                                      KeyColumns& columns) {
  IntVec codes[kLanes] = {};
  for (int t = 0; t < kLanes; ++t) {
    __builtin_memcpy(&codes[t], heads[t] + c, static_cast<std::size_t>(end - c));
  }
  for_each_column(codes, [&](int i, IntVec column) __attribute__((always_inline)) {
    columns.put(quad + i, vector, column);
  });
}

/// Channels [begin, end) of the heads of kColumnTokens tokens, at most kColumnChannels.
void transpose_keys(const std::byte* const* heads, std::int64_t begin, std::int64_t end,
                    KeyColumns& columns, RowsAhead& next) {
  for (int vector = 0; vector < kColumnVectors; ++vector, heads += kLanes) {
    std::int64_t quad = 0, c = begin;
    for (; end - c >= kQuadChannels; c += kQuadChannels, quad += kLanes) {
      transpose_whole(heads, c, quad, vector, columns, next);
    }
    if (c < end) transpose_rest(heads, c, end, quad, vector, columns);
  }
  columns.quads = (end - begin + kKeyQuad - 1) / kKeyQuad;
}

/// What the columns' tokens are scored with, and where to.
struct ColumnScores {
  const std::int16_t* q;       ///< Codes of row 0 of the block from the columns' channels on.
  Vec scales[kColumnVectors];  ///< Of the tokens.
  bool is_first;               ///< Else scores add to what is there.
  float* scores;               ///< [rows][kStripTokens]
};

/// Rows [row, row + Rows). Registers: Rows x kColumnVectors sums, as many pairs of K, one of Q.
template <int Rows>
[[gnu::noinline]] void score_columns(const InPlaceTile& tile, const KeyColumns& columns,
                                     const ColumnScores& to, std::int64_t row, RowsAhead& next) {
  const std::int16_t* q = to.q + row * tile.q_stride;
  IntVec sum[Rows][kColumnVectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int i = 0; i < kColumnVectors; ++i) sum[r][i] = broadcast_int(0);
  }
  RowsAhead ahead = next;  // In registers.
  for (std::int64_t quad = 0; quad < columns.quads; ++quad, q += kKeyQuad) {
    ahead.ask<kColumnTokens * kKeyQuad / 2>();
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const IntPairs q_r = broadcast_int_pair(q + r * tile.q_stride + 2 * pair);
#pragma GCC unroll 2
        for (int i = 0; i < kColumnVectors; ++i) {
          sum[r][i] = dot_int_pairs(sum[r][i], columns.pairs[2 * quad + pair][i], q_r);
        }
      }
    }
  }
  next = ahead;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const Vec step = broadcast(tile.q_steps[row + r]);
    float* scores = to.scores + (row + r) * kStripTokens;
#pragma GCC unroll 2
    for (int i = 0; i < kColumnVectors; ++i, scores += kLanes) {
      const Vec score = mul(to_f32(sum[r][i]), mul(to.scales[i], step));
      store(scores, to.is_first ? score : add(load(scores), score));
    }
  }
}

FOVEA_INLINE Vec scales_of(const StoredRows& keys, const std::byte* const* heads, int group) {
  if (keys.scales_at < 0) return broadcast(keys.scale);
  float scales[kLanes];
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) scales[t] = stored_scale(keys, heads[t], group);
  return load(scales);
}

/// scores[row * kStripTokens] of a head's rows and of kColumnTokens tokens from `token` on.
void score_int8_head(const InPlaceTile& tile, std::int64_t head, std::int64_t token, float* scores,
                     RowsAhead& next) {
  const StoredRows& keys = tile.k;
  const std::byte* heads[kColumnTokens];
  for (int t = 0; t < kColumnTokens; ++t) heads[t] = keys.rows[token + t] + keys.offset_of(head);
  const std::int64_t first = head * tile.head_stride, last = first + tile.head_rows;
  alignas(64) KeyColumns columns;
  ColumnScores to{.q = tile.q_codes, .scales = {}, .is_first = true, .scores = scores};
  std::int64_t begin = 0;
  for (int g = 0; g < keys.groups.count; ++g) {
    for (int i = 0; i < kColumnVectors; ++i) to.scales[i] = scales_of(keys, heads + i * kLanes, g);
    while (begin < keys.groups.end[g]) {
      const std::int64_t most = begin + kColumnChannels;
      const std::int64_t end = keys.groups.end[g] < most ? keys.groups.end[g] : most;
      transpose_keys(heads, begin, end, columns, next);
      std::int64_t row = first;
      for (; row + 4 <= last; row += 4) score_columns<4>(tile, columns, to, row, next);
      for (; row + 2 <= last; row += 2) score_columns<2>(tile, columns, to, row, next);
      if (row < last) score_columns<1>(tile, columns, to, row, next);
      to.q += columns.quads * kKeyQuad;
      to.is_first = false;
      begin = end;
    }
  }
}

/// Rows of tokens become tokens of rows, as softmax wants them.
void put_strip(const InPlaceTile& tile, std::int64_t strip, const float* scores) {
  for (std::int64_t row = 0; row < tile.rows; row += kLanes) {
    for (std::int64_t t = 0; t < kStripTokens; t += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) rows[r] = load(scores + (row + r) * kStripTokens + t);
      float* to = score_at(tile, row, strip + t);
      for_each_column(rows, [&](int i, Vec column) __attribute__((always_inline)) {
        store(to + i * kLanes, column);
      });
    }
  }
}

/// Whole strips of tokens: nobody looks at those behind the last, nor at rows behind a head's.
void score_int8_in_place(const InPlaceTile& tile) {
  alignas(64) float scores[kBlockRows * kStripTokens] = {};
  RowsAhead next = values_ahead(tile);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      for (std::int64_t t = 0; t < kStripTokens; t += kColumnTokens) {
        score_int8_head(tile, head, strip + t, scores + t, next);
      }
    }
    put_strip(tile, strip, scores);
  }
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
