// Scores of few rows per key head from keys stored as int8 and queries in fixed point.
// Included inside an instruction set's unit, after in_place-inl.h.
//
//   S[row][token] = K[token][:] . Q[row][:]        lanes are tokens
//
// Keys of as many tokens as a vector has lanes are transposed in registers, four channels of a
// token in a lane, and meet broadcasts of the query: no sum is left within a vector, and the scales
// of tokens are a vector too. Products are exact, so that their order is free.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Channels of a vector: four in a lane.
constexpr std::int64_t kQuadChannels = kKeyQuad * kLanes;
static_assert(kStripTokens % kLanes == 0);

/// Channels of one group against Rows rows.
struct QuadSpan {
  const std::byte* heads[kLanes];  ///< The keys' heads.
  const std::int16_t* q;           ///< Of the first row, from the span's first channel on.
  std::int64_t q_stride;
  std::int64_t begin;  ///< In the heads.
  std::int64_t end;
};

/// Sums of a row: kIntChains of them, so that one product need not wait for the other.
template <int Rows>
struct QuadSums {
  IntVec of[Rows][kIntChains];
  FOVEA_INLINE QuadSums() {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < kIntChains; ++i) of[r][i] = broadcast_int(0);
    }
  }
};

template <int Rows>
FOVEA_INLINE void add_quads(IntVec quads, const std::int16_t* q, std::int64_t q_stride,
                            QuadSums<Rows>& sums) {
  const IntPairs even = ((IntPairs)quads << 8) >> 8, odd = (IntPairs)quads >> 8;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const std::int16_t* q_r = q + r * q_stride;
    IntVec &first = sums.of[r][0], &last = sums.of[r][kIntChains - 1];
    first = dot_int_pairs(first, even, broadcast_int_pair(q_r));
    last = dot_int_pairs(last, odd, broadcast_int_pair(q_r + 2));
  }
}

/// scores[r * kStripTokens] becomes, or from the second span on grows by, sums times factors.
template <int Rows>
FOVEA_INLINE void add_sums(const QuadSums<Rows>& sums, Vec scales, const float* steps,
                           bool is_first, float* scores) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    float* to = scores + r * kStripTokens;
    const Vec factors = mul(scales, broadcast(steps[r]));
    IntVec sum = sums.of[r][0];
    if constexpr (kIntChains == 2) sum = add(sum, sums.of[r][1]);
    const Vec score = mul(to_f32(sum), factors);
    store(to, is_first ? score : add(load(to), score));
  }
}

/// Whole vectors of channels. Registers: kLanes of K, Rows x kIntChains sums.
template <int Rows>
FOVEA_INLINE QuadSums<Rows> sum_whole(const QuadSpan& span, UpcomingRows& next) {
  QuadSums<Rows> sums;
  const std::int16_t* q = span.q;
  UpcomingRows ahead = next;  // In registers.
  for (std::int64_t c = span.begin; c < span.end; c += kQuadChannels, q += kQuadChannels) {
    IntVec quads[kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; ++t) {
      __builtin_memcpy(&quads[t], span.heads[t] + c, sizeof quads[t]);
    }
    for_each_column(quads, [&](int i, IntVec column) __attribute__((always_inline)) {
      ahead.ask<kQuadChannels>();
      add_quads<Rows>(column, q + kKeyQuad * i, span.q_stride, sums);
    });
  }
  next = ahead;
  return sums;
}

/// The last channels of a group, less than a vector of them.
template <int Rows>
[[gnu::noinline]] void score_rest(const QuadSpan& span, Vec scales, const float* steps,
                                  bool is_first, float* scores) {
  IntVec quads[kLanes] = {};
  for (int t = 0; t < kLanes; ++t) {
    __builtin_memcpy(&quads[t], span.heads[t] + span.begin,
                     static_cast<std::size_t>(span.end - span.begin));
  }
  QuadSums<Rows> sums;
  for_each_column(quads, [&](int i, IntVec column) __attribute__((always_inline)) {
    if (span.begin + kKeyQuad * i >= span.end) return;
    add_quads<Rows>(column, span.q + kKeyQuad * i, span.q_stride, sums);
  });
  add_sums<Rows>(sums, scales, steps, is_first, scores);
}

FOVEA_INLINE Vec scales_of(const StoredRows& keys, const std::byte* const* heads, int group) {
  if (keys.scales_at < 0) return broadcast(keys.scale);
  float scales[kLanes];
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) scales[t] = stored_scale(keys, heads[t], group);
  return load(scales);
}

/// scores[r * kStripTokens] of kLanes tokens from `token` on, for rows from `row` on.
template <int Rows>
void score_rows(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t token,
                float* scores, UpcomingRows& next) {
  const StoredRows& keys = tile.k;
  const float* steps = tile.q_steps + row;
  QuadSpan span{.heads = {}, .q = tile.q_codes + row * tile.q_stride, .q_stride = tile.q_stride,
                .begin = 0, .end = 0};
  for (int t = 0; t < kLanes; ++t) span.heads[t] = keys.rows[token + t] + keys.offset_of(head);
  for (int g = 0; g < keys.groups.count; ++g) {
    const std::int64_t end = keys.groups.end[g];
    const std::int64_t whole = (end - span.begin) / kQuadChannels * kQuadChannels;
    const Vec scales = scales_of(keys, span.heads, g);
    span.end = span.begin + whole;
    if (whole > 0) {
      add_sums<Rows>(sum_whole<Rows>(span, next), scales, steps, span.begin == 0, scores);
    }
    span.begin = span.end;
    span.q += whole;
    span.end = end;
    if (span.begin < end) {
      score_rest<Rows>(span, scales, steps, span.begin == 0, scores);
      span.q += (end - span.begin + kKeyQuad - 1) / kKeyQuad * kKeyQuad;
    }
    span.begin = end;
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

/// Whole vectors of tokens: nobody looks at those behind the last, nor at rows behind a head's.
void score_int8_in_place(const InPlaceTile& tile) {
  alignas(64) float scores[kBlockRows * kStripTokens] = {};
  UpcomingRows next(tile.k, tile.heads, tile.capacity);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      for (std::int64_t t = 0; t < kStripTokens; t += kLanes) {
        std::int64_t row = head * tile.head_stride;
        const std::int64_t end = row + tile.head_rows;
        float* to = scores + row * kStripTokens + t;
        for (; row + 4 <= end; row += 4, to += 4 * kStripTokens) {
          score_rows<4>(tile, head, row, strip + t, to, next);
        }
        for (; row + 2 <= end; row += 2, to += 2 * kStripTokens) {
          score_rows<2>(tile, head, row, strip + t, to, next);
        }
        if (row < end) score_rows<1>(tile, head, row, strip + t, to, next);
      }
    }
    put_strip(tile, strip, scores);
  }
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
