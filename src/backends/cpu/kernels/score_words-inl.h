// Scores of few rows per key head from keys stored as int8 and queries in fixed point, where the
// instruction set multiplies pairs of int16 at most.
// Included inside an instruction set's unit, after add_words-inl.h.
//
//   S[token][row] = K[token][:] . Q[row][:]      lanes are pairs of channels, each with all rows
//
// Keys of a few tokens become int16 in L1, from where loads repeat their pairs for nothing; a
// vector of the query has the same pairs of each row. What is left to add within a vector are as
// many sums as a row has lanes. Products are exact, and so are their sums: their order is free.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Channels that are widened before they are multiplied.
constexpr std::int64_t kWideChannels = 128;
/// Queries are words of 16 bits.
constexpr bool kQueryDigits = false;

/// Codes of kDotSums tokens as int16, zeros behind the last up to whole vectors. From a token to
/// the next is no power of two, lest a load seem to read what was stored for another.
struct WideKeys {
  alignas(64) std::int16_t codes[kDotSums][kWideChannels + 2 * kLanes];
  std::int64_t channels;
};

/// The last channels of a span, from `begin` on, less than 2 * kLanes: rare, so not inline.
[[gnu::noinline]] void widen_last(const KeySpan& span, std::int64_t begin, WideKeys& keys) {
  for (int t = 0; t < kDotSums; ++t) {
    std::int8_t some[2 * kLanes] = {};
    __builtin_memcpy(some, span.heads[t] + span.begin + begin,
                     static_cast<std::size_t>(keys.channels - begin));
    const IntPairs wide = load_int_pairs(some);
    __builtin_memcpy(keys.codes[t] + begin, &wide, sizeof wide);
  }
}

/// Channels [span.begin, end) of the span's heads, which lie `head_bytes` apart. With each line of
/// codes one of what is needed soon is asked for, and one of the next heads comes from L2 to L1.
FOVEA_INLINE void widen_keys(const KeySpan& span, std::int64_t end, std::int64_t head_bytes,
                             WideKeys& keys, RowsAhead& next) {
  constexpr std::int64_t kCodes = 2 * kLanes;
  constexpr std::int64_t kTokens = RowsAhead::kLine / kCodes;  // Whose codes of a step are a line.
  static_assert(kDotSums % kTokens == 0);
  keys.channels = end - span.begin;
  RowsAhead ahead = next;  // In registers.
  std::int64_t c = 0;
  for (; c + kCodes <= keys.channels; c += kCodes) {
    const std::int64_t from = span.begin + c, step = c / kCodes % kTokens;
    // The next heads' first line is the last one here.
    const std::int64_t next_head = from + head_bytes + RowsAhead::kLine - step * kCodes;
#pragma GCC unroll 16
    for (std::int64_t t = 0; t < kDotSums; t += kTokens) {
      ahead.ask<RowsAhead::kLine>();
      __builtin_prefetch(span.heads[t + step] + next_head, 0, 3);
#pragma GCC unroll 16
      for (std::int64_t i = t; i < t + kTokens; ++i) {
        const IntPairs wide =
            load_int_pairs(reinterpret_cast<const std::int8_t*>(span.heads[i] + from));
        __builtin_memcpy(keys.codes[i] + c, &wide, sizeof wide);
      }
    }
  }
  next = ahead;
  if (c < keys.channels) widen_last(span, c, keys);
}

/// Rows from span.row on, against `q`, their codes from the first channel on. Registers: kDotSums
/// sums, a vector of Q and one of K.
template <int Rows>
[[gnu::noinline]] void score_wide(const InPlaceTile& tile, const KeySpan& span,
                                  const WideKeys& keys, const std::int16_t* q, RowsAhead& next) {
  constexpr int kWords = kLanes / Rows;  // Of a row in a vector.
  IntVec sums[kDotSums];
#pragma GCC unroll 16
  for (int t = 0; t < kDotSums; ++t) sums[t] = broadcast_int(0);
  RowsAhead ahead = next;  // In registers.
  for (std::int64_t c = 0; c < keys.channels; c += 2 * kWords, q += 2 * kLanes) {
    ahead.ask<kDotSums * kWords>();
    const IntPairs q_c = repeat_words<kLanes>(q);
#pragma GCC unroll 16
    for (int t = 0; t < kDotSums; ++t) {
      sums[t] = dot_int_pairs(sums[t], repeat_words<kWords>(keys.codes[t] + c), q_c);
    }
  }
  next = ahead;
  add_words<kWords>(sums, kDotSums);
  const Vec steps = (Vec)repeat_words<Rows>(tile.q_steps + span.row);
  float dots[kDotSums * Rows];
#pragma GCC unroll 8
  for (int i = 0; i < kDotSums * Rows / kLanes; ++i) {
    store(dots + i * kLanes, mul(to_f32(sums[i]), steps));
  }
  add_dots<std::int8_t, Rows, kDotSums>(tile, span, dots);
}

/// kDotSums tokens from `token` on of a head.
void score_int8_head(const InPlaceTile& tile, std::int64_t head, std::int64_t token,
                     RowsAhead& next) {
  KeySpan span{.heads = {}, .row = 0, .token = token, .group = 0, .begin = 0};
#pragma GCC unroll 16
  for (int t = 0; t < kDotSums; ++t) {
    span.heads[t] = tile.k.rows[token + t] + tile.k.offset_of(head);
  }
  const std::int64_t first = head * tile.head_stride, last = first + tile.head_rows;
  WideKeys keys;
  std::int64_t q_channel = 0;
  for (; span.group < tile.k.groups.count; ++span.group) {
    const std::int64_t group_end = tile.k.groups.end[span.group];
    while (span.begin < group_end) {
      const std::int64_t most = span.begin + kWideChannels;
      const std::int64_t end = group_end < most ? group_end : most;
      widen_keys(span, end, tile.k.head_bytes, keys, next);
      const auto q_at = [&](int rows) {
        return tile.q_codes + span.row * tile.q_code_stride + q_channel * rows;
      };
      span.row = first;
      for (; span.row + 4 <= last; span.row += 4) score_wide<4>(tile, span, keys, q_at(4), next);
      for (; span.row + 2 <= last; span.row += 2) score_wide<2>(tile, span, keys, q_at(2), next);
      if (span.row < last) score_wide<1>(tile, span, keys, q_at(1), next);
      q_channel += (keys.channels + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
      span.begin = end;
    }
  }
}

/// Whole register tiles of tokens: nobody looks at those behind the last.
void score_int8_in_place(const InPlaceTile& tile) {
  RowsAhead next = values_ahead(tile);
  for (std::int64_t token = 0; token < tile.tokens; token += kDotSums) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      score_int8_head(tile, head, token, next);
    }
  }
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
