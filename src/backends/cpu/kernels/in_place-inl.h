// Attention of few rows per key head: keys and values are converted in registers, where they lie.
// Included inside an instruction set's unit.
//
//   S[token][row] = K[token][:] . Q[row][:]        lanes are channels, summed up at the end
//   P             = softmax-inl.h                  lanes are the rows of all heads
//   O[row][:]     = O[row][:] * correction + P V   lanes are channels
//
// A query head that shares its keys with few others would leave most lanes of a row vector empty,
// and a copy of the tile would cost more than what is done with it. What limits such rows is
// reading: so a strip of tokens passes with all its heads, in the order of the memory, and the same
// place of the next tile is asked for meanwhile.
//
// Every sum runs over its index in order, whatever the register tile: a row's bits do not depend on
// the rows that it is computed with.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Tokens of all heads that are worked on before the next ones. Fewer would load and store sums of
/// the output more often, more would leave L1 before all of their lines are used.
constexpr std::int64_t kStripTokens = 32;
static_assert(kTileTokens % kStripTokens == 0);

/// Stored codes of four bits, two in a byte.
struct Nibbles {};

template <class T>
constexpr std::int64_t kElementBits = 8 * sizeof(T);
template <>
constexpr std::int64_t kElementBits<Nibbles> = 4;

/// Whether the elements have scales.
template <class T>
constexpr bool kHasScales = kElementBits<T> <= 8;

/// Channels [c, c + kLanes) of the head at `head`.
template <class T>
FOVEA_INLINE Vec load_channels(const std::byte* head, std::int64_t c) {
  if constexpr (kElementBits<T> == 4) {
    return unpack_nibbles(reinterpret_cast<const std::uint8_t*>(head) + c / 2);
  } else {
    return load(reinterpret_cast<const T*>(head) + c);
  }
}

/// Channels [c, c + n), n < kLanes, and zeros. Rare, and not worth its code in every register tile.
template <class T>
[[gnu::noinline]] Vec load_last_channels(const std::byte* head, std::int64_t c, std::int64_t n) {
  if constexpr (kElementBits<T> == 4) {
    std::uint8_t codes[kLanes / 2] = {};
    const auto* from = reinterpret_cast<const std::uint8_t*>(head) + c / 2;
    __builtin_memcpy(codes, from, static_cast<std::size_t>(n / 2));
    return unpack_nibbles(codes);
  } else {
    return load_partial(reinterpret_cast<const T*>(head) + c, n);
  }
}

/// Asks for memory ahead of time, towards L2.
FOVEA_INLINE void ask_for(const std::byte* p, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

FOVEA_INLINE float* score_at(const ScoreBlock& block, std::int64_t row, std::int64_t token) {
  return block.scores + (row / kLanes * block.capacity + token) * kLanes + row % kLanes;
}

/// sum[t][r] over its lanes becomes the score of row `row` + r and token `token` + t. Four rows lie
/// in one row vector.
template <int Rows, int Tokens>
FOVEA_INLINE void store_dots(const ScoreBlock& block, std::int64_t row, std::int64_t token,
                             const Vec (&sum)[Tokens][Rows]) {
  float* scores = score_at(block, row, token);
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
template <class T, int Rows, int Tokens>
FOVEA_INLINE void dot_tile(const InPlaceTile& tile, std::int64_t head, std::int64_t row,
                           std::int64_t token) {
  const StoredRows& keys = tile.k;
  const float* q = tile.q + row * tile.q_stride;
  const std::byte* k[Tokens];
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; ++t) k[t] = keys.rows[token + t] + keys.offset_of(head);
  Vec sum[Tokens][Rows];
#pragma GCC unroll 8
  for (int t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sum[t][r] = broadcast(0.f);
  }
  std::int64_t c = 0;
  for (int g = 0; g < keys.groups.count; ++g) {
    const std::int64_t end = keys.groups.end[g];
    const float* scales = nullptr;
    if constexpr (kHasScales<T>) scales = keys.scales_of(head, g, tile.capacity) + token;
    for (; c < end; c += kLanes) {
      Vec q_c[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) q_c[r] = load(q + r * tile.q_stride + c);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) {
        Vec k_t = c + kLanes <= end ? load_channels<T>(k[t], c)
                                    : load_last_channels<T>(k[t], c, end - c);
        if constexpr (kHasScales<T>) k_t = mul(k_t, broadcast(scales[t]));
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sum[t][r] = fma(k_t, q_c[r], sum[t][r]);
      }
    }
    c = end;
  }
  store_dots<Rows, Tokens>(tile, row, token, sum);
}

/// Whole register tiles of tokens of a strip: nobody looks at those behind the last.
template <class T, int Rows>
void dot_strip(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t strip) {
  constexpr int kTokens = kDotSums / Rows < 8 ? kDotSums / Rows : 8;
  static_assert(kStripTokens % kTokens == 0);
  const StoredRows& keys = tile.k;
  const bool asks = keys.next_rows != nullptr && row == head * tile.head_stride;
  for (std::int64_t t = strip; t < strip + kStripTokens && t < tile.tokens; t += kTokens) {
    for (int i = 0; asks && i < kTokens; ++i) {
      ask_for(keys.next_rows[t + i] + keys.offset_of(head), keys.head_bytes);
    }
    dot_tile<T, Rows, kTokens>(tile, head, row, t);
  }
}

template <class T>
void score_in_place(const InPlaceTile& tile) {
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      std::int64_t row = head * tile.head_stride;
      const std::int64_t end = row + tile.head_rows;
      for (; row + 4 <= end; row += 4) dot_strip<T, 4>(tile, head, row, strip);
      for (; row + 2 <= end; row += 2) dot_strip<T, 2>(tile, head, row, strip);
      if (row < end) dot_strip<T, 1>(tile, head, row, strip);
    }
  }
}

/// Channels [begin, end) of a group of a head's values, for rows from `row` of the block on.
struct ValueSpan {
  std::int64_t head;
  std::int64_t row;
  int group;
  std::int64_t begin;
  std::int64_t end;
  bool asks;
};

/// out[Rows][Vectors * lanes] += weights of tokens [begin, end) times values. Registers: Rows x
/// Vectors sums, Vectors of V, one broadcast of P.
template <class T, int Rows, int Vectors>
FOVEA_INLINE void add_tile(const InPlaceTile& tile, const ValueSpan& span, std::int64_t begin,
                           std::int64_t end) {
  const StoredRows& values = tile.v;
  const std::int64_t head_at = values.offset_of(span.head);
  const float* scales = nullptr;
  if constexpr (kHasScales<T>) scales = values.scales_of(span.head, span.group, tile.capacity);
  const float* weights = score_at(tile, span.row, 0);
  float* out = tile.out + span.row * tile.out_stride + span.begin;
  constexpr std::int64_t kBytes = Vectors * kLanes * kElementBits<T> / 8;
  const std::int64_t next_at = head_at + span.begin * kElementBits<T> / 8;
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[r][j] = load(out + r * tile.out_stride + j * kLanes);
  }
  for (std::int64_t t = begin; t < end; ++t) {
    if (span.asks) ask_for(values.next_rows[t] + next_at, kBytes);
    const std::byte* v = values.rows[t] + head_at;
    Vec v_t[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      const std::int64_t c = span.begin + j * kLanes;
      v_t[j] = c + kLanes <= span.end ? load_channels<T>(v, c)
                                      : load_last_channels<T>(v, c, span.end - c);
      if constexpr (kHasScales<T>) v_t[j] = mul(v_t[j], broadcast(scales[t]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec p = broadcast(weights[t * kLanes + r]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[r][j] = fma(p, v_t[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(out + r * tile.out_stride + j * kLanes, sum[r][j]);
  }
}

/// Tokens [begin, end), all of which the rows see, of all channels.
template <class T, int Rows>
void add_rows(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  constexpr int kVectors = kDotSums / Rows;
  ValueSpan span{.head = head, .row = row, .group = 0, .begin = 0, .end = 0,
                 .asks = tile.v.next_rows != nullptr && row == head * tile.head_stride};
  for (; span.group < tile.v.groups.count; ++span.group) {
    span.end = tile.v.groups.end[span.group];
    for (; span.end - span.begin >= kVectors * kLanes; span.begin += kVectors * kLanes) {
      add_tile<T, Rows, kVectors>(tile, span, begin, end);
    }
    for (; span.begin < span.end; span.begin += kLanes) {
      add_tile<T, Rows, 1>(tile, span, begin, end);
    }
    span.begin = span.end;
  }
}

/// As add_rows, of the tokens that the row sees: a value is never multiplied by the weight 0 of a
/// row that does not see it, since it may be NaN.
template <class T>
void add_seen(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  while (begin < end) {
    const std::uint64_t seen = tile.row_mask[row] >> begin;
    if (seen == 0) return;
    begin += __builtin_ctzll(seen);
    const std::uint64_t hidden = ~(tile.row_mask[row] >> begin);  // The lowest bit is 0.
    const std::int64_t count = hidden == 0 ? kTileTokens : __builtin_ctzll(hidden);
    const std::int64_t last = begin + count < end ? begin + count : end;
    if (begin < last) add_rows<T, 1>(tile, head, row, begin, last);
    begin = last;
  }
}

template <class T>
void add_strip(const InPlaceTile& tile, std::int64_t head, std::int64_t begin, std::int64_t end) {
  std::int64_t row = head * tile.head_stride;
  const std::int64_t last = row + tile.head_rows;
  for (; tile.row_mask && row < last; ++row) add_seen<T>(tile, head, row, begin, end);
  for (; row + 4 <= last; row += 4) add_rows<T, 4>(tile, head, row, begin, end);
  for (; row + 2 <= last; row += 2) add_rows<T, 2>(tile, head, row, begin, end);
  if (row < last) add_rows<T, 1>(tile, head, row, begin, end);
}

void correct_rows(const InPlaceTile& tile, const float* correction) {
  for (std::int64_t head = 0; head < tile.heads; ++head) {
    for (std::int64_t r = 0; r < tile.head_rows; ++r) {
      const std::int64_t row = head * tile.head_stride + r;
      float* out = tile.out + row * tile.out_stride;
      const Vec factor = broadcast(correction[row]);
      for (std::int64_t c = 0; c < tile.v.channels; c += kLanes) {
        store(out + c, mul(load(out + c), factor));
      }
    }
  }
}

template <class T>
void add_in_place(const InPlaceTile& tile, const float* correction) {
  correct_rows(tile, correction);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    const std::int64_t rest = strip + kStripTokens;
    const std::int64_t strip_end = rest < tile.tokens ? rest : tile.tokens;
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      add_strip<T>(tile, head, strip, strip_end);
    }
  }
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
