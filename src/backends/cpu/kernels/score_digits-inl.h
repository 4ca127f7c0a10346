// Scores of few rows per key head from keys stored as int8 and queries in fixed point, where the
// instruction set multiplies bytes.
// Included inside an instruction set's unit, after add_words-inl.h.
//
//   S[token][row] = 256 K[token][:] . high[row][:] + K[token][:] . low[row][:]
//
// A query's code of 16 bits is two signed digits of 8; keys meet them where they lie, as code + 128
// since one factor of such a product is unsigned. Lanes are four channels each, with all rows: a
// vector repeats some channels of a key, one of the digits has the same of each row. What is left
// to add within a vector are as many sums as a row has lanes. Products are exact, and so are their
// sums, modulo 2^32 on the way: their order is free.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

constexpr bool kQueryDigits = true;
/// Turns four codes of int8 into code + 128: 0x80 in each byte.
constexpr std::int32_t kToUnsigned = -0x7f7f7f80;
/// Keys of a register tile: each has a sum for either digit.
constexpr int kDigitTokens = kDotSums / 2;

/// Sums of a group's products with either digit.
struct DigitSums {
  IntVec high[kDigitTokens], low[kDigitTokens];

  /// `heads` are where the tokens' codes lie, or copies of them, from channel `c` on.
  template <int Words>
  FOVEA_INLINE void add(const std::byte* const* heads, std::int64_t c, const std::int8_t* digits) {
    const IntVec high_c = (IntVec)repeat_words<kLanes>(digits);
    const IntVec low_c = (IntVec)repeat_words<kLanes>(digits + 4 * kLanes);
#pragma GCC unroll 8
    for (int t = 0; t < kDigitTokens; ++t) {
      const IntVec k_t = (IntVec)repeat_words<Words>(heads[t] + c) ^ broadcast_int(kToUnsigned);
      high[t] = dot_bytes(high[t], k_t, high_c);
      low[t] = dot_bytes(low[t], k_t, low_c);
    }
  }
};

FOVEA_INLINE IntVec join_digits(IntVec high, IntVec low) {
  typedef std::uint32_t Words __attribute__((vector_size(sizeof(IntVec))));  // They wrap around.
  return (IntVec)(((Words)high << 8) + (Words)low);
}

/// Rows from span.row on, against all groups of their digits. Registers: two sums a token, a vector
/// of each digit, one of K and what makes it unsigned.
template <int Rows>
[[gnu::noinline]] void score_digits(const InPlaceTile& tile, KeySpan& span, RowsAhead& next) {
  constexpr int kWords = kLanes / Rows;  // Of a row in a vector.
  constexpr std::int64_t kStep = 4 * kWords;
  const std::int16_t* codes = tile.q_codes + span.row * tile.q_code_stride;
  const auto* q = reinterpret_cast<const std::int8_t*>(codes);
  RowsAhead ahead = next;  // In registers.
  ahead.ask<RowsAhead::kLine>();  // As long as the scales of so many tokens are.
  span.begin = 0;
  for (span.group = 0; span.group < tile.k.groups.count; ++span.group) {
    const std::int64_t end = tile.k.groups.end[span.group];
    DigitSums sums;
    const IntVec bias = (IntVec)repeat_words<kLanes>(q);
    q += 4 * kLanes;
#pragma GCC unroll 8
    for (int t = 0; t < kDigitTokens; ++t) sums.high[t] = broadcast_int(0), sums.low[t] = bias;
    std::int64_t c = span.begin;
    for (; c + kStep <= end; c += kStep, q += 8 * kLanes) {
      ahead.ask<kDigitTokens * kStep>();
      sums.add<kWords>(span.heads, c, q);
    }
    if (c < end) {
      std::byte rest[kDigitTokens][kStep] = {};
      const std::byte* heads[kDigitTokens];
      for (int t = 0; t < kDigitTokens; ++t) {
        __builtin_memcpy(rest[t], span.heads[t] + c, static_cast<std::size_t>(end - c));
        heads[t] = rest[t];
      }
      sums.add<kWords>(heads, 0, q);
      q += 8 * kLanes;
    }
    constexpr int kVectors = kDigitTokens > kWords ? kDigitTokens : kWords;
    IntVec whole[kDotSums];
#pragma GCC unroll 16
    for (int t = 0; t < kVectors; ++t) {
      whole[t] = t < kDigitTokens ? join_digits(sums.high[t], sums.low[t]) : broadcast_int(0);
    }
    add_words<kWords>(whole, kVectors);
    const Vec steps = (Vec)repeat_words<Rows>(tile.q_steps + span.row);
    float dots[kVectors * Rows];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors / kWords; ++i) {
      store(dots + i * kLanes, mul(to_f32(whole[i]), steps));
    }
    add_dots<std::int8_t, Rows, kDigitTokens>(tile, span, dots);
    span.begin = end;
  }
  next = ahead;
}

/// Whole register tiles of tokens: nobody looks at those behind the last.
void score_int8_in_place(const InPlaceTile& tile) {
  RowsAhead next = values_ahead(tile);
  for (std::int64_t token = 0; token < tile.tokens; token += kDigitTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      KeySpan span{.heads = {}, .row = head * tile.head_stride, .token = token, .group = 0,
                   .begin = 0};
#pragma GCC unroll 8
      for (int t = 0; t < kDigitTokens; ++t) {
        span.heads[t] = tile.k.rows[token + t] + tile.k.offset_of(head);
      }
      const std::int64_t last = span.row + tile.head_rows;
      for (; span.row + 4 <= last; span.row += 4) score_digits<4>(tile, span, next);
      for (; span.row + 2 <= last; span.row += 2) score_digits<2>(tile, span, next);
      if (span.row < last) score_digits<1>(tile, span, next);
    }
  }
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
