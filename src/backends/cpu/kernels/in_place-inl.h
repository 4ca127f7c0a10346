// Attention of few rows per key head: keys and values are converted in registers, where they lie.
// Included inside an instruction set's unit.
//
//   S[token][row] = K[token][:] . Q[row][:]        lanes are channels, summed up at the end
//   P             = softmax-inl.h                  lanes are the rows of all heads
//   O[row][:]     = O[row][:] * correction + P V   lanes are channels
//
// A query head that shares its keys with few others would leave most lanes of a row vector empty,
// and a copy of the tile would cost more than what is done with it. What limits such rows is
// reading: so a strip of tokens passes with all its heads, in the order of the memory, and as much
// of the next tile is asked for meanwhile.
//
// Every sum runs over its index in order, whatever the register tile: a row's bits do not depend on
// the rows that it is computed with.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Tokens of all heads that are worked on before the next ones. Fewer would load and store sums of
/// the output more often, more would be further from the order of the memory.
constexpr std::int64_t kStripTokens = 16;
static_assert(kTileTokens % kStripTokens == 0 && kStripTokens % kDotSums == 0);

/// Stored codes of four bits, two in a byte.
struct Nibbles {};
/// Stored codes of int8 for a query in fixed point.
struct ExactInt8 {};

template <class T>
constexpr std::int64_t kElementBits = 8 * sizeof(T);
template <>
constexpr std::int64_t kElementBits<Nibbles> = 4;
template <>
constexpr std::int64_t kElementBits<ExactInt8> = 8;

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

/// Channels [c, c + n), n < kLanes, and zeros.
template <class T>
FOVEA_INLINE Vec load_last_channels(const std::byte* head, std::int64_t c, std::int64_t n) {
  if constexpr (kElementBits<T> == 4) {
    std::uint8_t codes[kLanes / 2] = {};
    const auto* from = reinterpret_cast<const std::uint8_t*>(head) + c / 2;
    __builtin_memcpy(codes, from, static_cast<std::size_t>(n / 2));
    return unpack_nibbles(codes);
  } else {
    return load_partial(reinterpret_cast<const T*>(head) + c, n);
  }
}

/// Asks for the rows of the tile that comes next, line by line in the order of the memory, while
/// this one is worked on: so the processor's own prefetch follows, which has more lines on their
/// way than a core may ask for.
class UpcomingRows {
 public:
  UpcomingRows(const StoredRows& rows, std::int64_t heads, std::int64_t capacity)
      : rows_(rows.has_next ? rows.rows + capacity : nullptr),
        head_at_(rows.head_at),
        bytes_(heads * rows.head_bytes) {}

  /// For as much as `bytes` of this tile are.
  void ask(std::int64_t bytes) {
    if (!rows_) return;
    for (due_ += bytes; due_ > 0;) {
      __builtin_prefetch(*rows_ + head_at_ + at_, 0, 2);
      const std::int64_t left = bytes_ - at_;
      due_ -= left < kLine ? left : kLine;
      at_ += kLine;
      if (left > kLine) continue;
      at_ = 0;
      ++rows_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const std::byte* const* rows_;  ///< From the one on that is asked for.
  std::int64_t head_at_;
  std::int64_t bytes_;    ///< Of a row.
  std::int64_t at_ = 0;   ///< In the row.
  std::int64_t due_ = 0;  ///< Bytes; below 0 where a line went beyond.
};

FOVEA_INLINE float scale_of(const StoredRows& rows, const std::byte* head, int group) {
  if (rows.scales_at < 0) return rows.scale;
  float scale;
  __builtin_memcpy(&scale, head + rows.scales_at + group * std::int64_t{sizeof scale},
                   sizeof scale);
  return scale;
}

FOVEA_INLINE float* score_at(const ScoreBlock& block, std::int64_t row, std::int64_t token) {
  return block.scores + (row / kLanes * block.capacity + token) * kLanes + row % kLanes;
}

/// Register tiles of Q and K: what products are summed up in, and how many channels a vector has.
template <class T>
struct Products {
  using Sum = Vec;
  using Channels = Vec;
  static constexpr std::int64_t kChannels = kLanes;
  static FOVEA_INLINE Sum zero() { return broadcast(0.f); }
  static FOVEA_INLINE const float* query(const InPlaceTile& tile, std::int64_t row) {
    return tile.q + row * tile.q_stride;
  }
  static FOVEA_INLINE Channels load_query(const float* q) { return load(q); }
  static FOVEA_INLINE Channels load_key(const std::byte* head, std::int64_t c) {
    return load_channels<T>(head, c);
  }
  static FOVEA_INLINE Channels load_last(const std::byte* head, std::int64_t c, std::int64_t n) {
    return load_last_channels<T>(head, c, n);
  }
  static FOVEA_INLINE Sum add_product(Sum sum, Channels k, Channels q) { return fma(k, q, sum); }
  static FOVEA_INLINE void store_sums(float* dots, const Sum (&sums)[kLanes]) {
    store(dots, sums_of_lanes(sums));
  }
};

template <>
struct Products<ExactInt8> {
  using Sum = IntVec;
  using Channels = IntPairs;
  static constexpr std::int64_t kChannels = 2 * kLanes;
  static FOVEA_INLINE Sum zero() { return broadcast_int(0); }
  static FOVEA_INLINE const std::int16_t* query(const InPlaceTile& tile, std::int64_t row) {
    return tile.q_codes + row * tile.q_stride;
  }
  static FOVEA_INLINE Channels load_query(const std::int16_t* q) { return load_int_pairs(q); }
  static FOVEA_INLINE Channels load_key(const std::byte* head, std::int64_t c) {
    return load_int_pairs(reinterpret_cast<const std::int8_t*>(head) + c);
  }
  static FOVEA_INLINE Channels load_last(const std::byte* head, std::int64_t c, std::int64_t n) {
    std::int8_t codes[kChannels] = {};
    __builtin_memcpy(codes, head + c, static_cast<std::size_t>(n));
    return load_int_pairs(codes);
  }
  static FOVEA_INLINE Sum add_product(Sum sum, Channels k, Channels q) {
    return dot_int_pairs(sum, k, q);
  }
  static FOVEA_INLINE void store_sums(float* dots, const Sum (&sums)[kLanes]) {
    store(dots, to_f32(sums_of_lanes(sums)));
  }
};

/// Keys of the tokens of a register tile: a head of each, and channels from `begin` on of a group.
struct KeySpan {
  const std::byte* heads[kDotSums];
  std::int64_t row;
  std::int64_t token;
  int group;
  std::int64_t begin;
};

/// sums[t * Rows + r] over their lanes and times the scale of token t becomes, or from the second
/// span on is added to, the score of row r and token t of the register tile.
template <class T, int Rows>
FOVEA_INLINE void add_dots(const InPlaceTile& tile, const KeySpan& span,
                           const typename Products<T>::Sum (&sums)[kDotSums]) {
  using Sum = typename Products<T>::Sum;
  static_assert(kDotSums % kLanes == 0);
  float dots[kDotSums];
#pragma GCC unroll 4
  for (int i = 0; i < kDotSums; i += kLanes) {
    Sum whole[kLanes];
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) whole[l] = sums[i + l];
    Products<T>::store_sums(dots + i, whole);
  }
  typedef float Row __attribute__((vector_size(sizeof(float) * Rows)));
  float* scores = score_at(tile, span.row, span.token);
  Row steps;
  __builtin_memcpy(&steps, tile.q_steps + span.row, sizeof steps);
#pragma GCC unroll 16
  for (int t = 0; t < kDotSums / Rows; ++t) {
    Row score, before;
    __builtin_memcpy(&score, dots + t * Rows, sizeof score);
    if constexpr (kHasScales<T>) score *= steps * scale_of(tile.k, span.heads[t], span.group);
    if (span.begin > 0) {
      __builtin_memcpy(&before, scores + t * kLanes, sizeof before);
      score += before;
    }
    __builtin_memcpy(scores + t * kLanes, &score, sizeof score);
  }
}

/// The last channels of a group, less than a vector of them. Rare, and not worth its code in
/// the register tile: a call there would keep the sums in memory.
template <class T, int Rows>
[[gnu::noinline]] void dot_rest(const InPlaceTile& tile, const KeySpan& span, std::int64_t end) {
  using P = Products<T>;
  const auto* q = P::query(tile, span.row) + span.begin;
  typename P::Sum sum[kDotSums];
  for (int i = 0; i < kDotSums; ++i) {
    const auto k_t = P::load_last(span.heads[i / Rows], span.begin, end - span.begin);
    sum[i] = P::add_product(P::zero(), k_t, P::load_query(q + i % Rows * tile.q_stride));
  }
  add_dots<T, Rows>(tile, span, sum);
}

/// Whole vectors of channels up to `end`. Registers: kDotSums sums, Rows vectors of Q, one of K.
template <class T, int Rows>
FOVEA_INLINE void dot_whole(const InPlaceTile& tile, const KeySpan& span, std::int64_t end) {
  using P = Products<T>;
  const auto* q = P::query(tile, span.row);
  typename P::Sum sum[kDotSums];
#pragma GCC unroll 16
  for (int i = 0; i < kDotSums; ++i) sum[i] = P::zero();
  for (std::int64_t c = span.begin; c < end; c += P::kChannels) {
    typename P::Channels q_c[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) q_c[r] = P::load_query(q + r * tile.q_stride + c);
#pragma GCC unroll 16
    for (int t = 0; t < kDotSums / Rows; ++t) {
      const typename P::Channels k_t = P::load_key(span.heads[t], c);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        sum[t * Rows + r] = P::add_product(sum[t * Rows + r], k_t, q_c[r]);
      }
    }
  }
  add_dots<T, Rows>(tile, span, sum);
}

template <class T, int Rows>
FOVEA_INLINE void dot_tile(const InPlaceTile& tile, std::int64_t head, std::int64_t row,
                           std::int64_t token) {
  constexpr std::int64_t kChannels = Products<T>::kChannels;
  const StoredRows& keys = tile.k;
  KeySpan span{.heads = {}, .row = row, .token = token, .group = 0, .begin = 0};
#pragma GCC unroll 16
  for (int t = 0; t < kDotSums / Rows; ++t) {
    span.heads[t] = keys.rows[token + t] + keys.offset_of(head);
  }
  for (; span.group < keys.groups.count; ++span.group) {
    const std::int64_t end = keys.groups.end[span.group];
    const std::int64_t whole = span.begin + (end - span.begin) / kChannels * kChannels;
    if (span.begin < whole) dot_whole<T, Rows>(tile, span, whole);
    span.begin = whole;
    if (whole < end) dot_rest<T, Rows>(tile, span, end);
    span.begin = end;
  }
}

/// Whole register tiles of tokens of a strip: nobody looks at those behind the last.
template <class T, int Rows>
void dot_strip(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t strip) {
  for (std::int64_t t = strip; t < strip + kStripTokens && t < tile.tokens; t += kDotSums / Rows) {
    dot_tile<T, Rows>(tile, head, row, t);
  }
}

template <class T>
void score_in_place(const InPlaceTile& tile) {
  UpcomingRows next(tile.k, tile.heads, tile.capacity);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      next.ask(kStripTokens * tile.k.head_bytes);
      std::int64_t row = head * tile.head_stride;
      const std::int64_t end = row + tile.head_rows;
      for (; row + 4 <= end; row += 4) dot_strip<T, 4>(tile, head, row, strip);
      for (; row + 2 <= end; row += 2) dot_strip<T, 2>(tile, head, row, strip);
      if (row < end) dot_strip<T, 1>(tile, head, row, strip);
    }
  }
}

/// Values of tokens [begin, end) of a head, and channels from `channel` on of a group; rows from
/// `row` of the block on, all of which see the tokens.
struct ValueSpan {
  std::int64_t head;
  std::int64_t row;
  std::int64_t begin;
  std::int64_t end;
  int group;
  std::int64_t channel;
};

/// Weights of a span's tokens, Rows of them every `stride`.
struct SpanWeights {
  const float* at;
  std::int64_t stride;
};

/// Times the scales of the values, in `scaled`, where they have any.
template <class T, int Rows>
FOVEA_INLINE SpanWeights weights_of(const InPlaceTile& tile, const ValueSpan& span,
                                    float (&scaled)[kStripTokens * Rows]) {
  const float* weights = score_at(tile, span.row, span.begin);
  if constexpr (!kHasScales<T>) return {weights, kLanes};
  const std::int64_t head_at = tile.v.offset_of(span.head);
  for (std::int64_t t = 0; t < span.end - span.begin; ++t) {
    const float scale = scale_of(tile.v, tile.v.rows[span.begin + t] + head_at, span.group);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) scaled[t * Rows + r] = weights[t * kLanes + r] * scale;
  }
  return {scaled, Rows};
}

/// out[Rows][Vectors * lanes] += weights times values. Registers: Rows x Vectors sums, Vectors of
/// V, one broadcast of P.
template <class T, int Rows, int Vectors>
FOVEA_INLINE void add_tile(const InPlaceTile& tile, const ValueSpan& span,
                           const SpanWeights& weights) {
  const StoredRows& values = tile.v;
  const std::int64_t head_at = values.offset_of(span.head);
  float* out = tile.out + span.row * tile.out_stride + span.channel;
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[r][j] = load(out + r * tile.out_stride + j * kLanes);
  }
  const float* p = weights.at;
  for (std::int64_t t = span.begin; t < span.end; ++t, p += weights.stride) {
    const std::byte* v = values.rows[t] + head_at;
    Vec v_t[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) v_t[j] = load_channels<T>(v, span.channel + j * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec p_r = broadcast(p[r]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[r][j] = fma(p_r, v_t[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(out + r * tile.out_stride + j * kLanes, sum[r][j]);
  }
}

/// The last channels of a group: as dot_rest.
template <class T, int Rows>
[[gnu::noinline]] void add_rest(const InPlaceTile& tile, const ValueSpan& span,
                                const SpanWeights& weights, std::int64_t channels) {
  float* out = tile.out + span.row * tile.out_stride + span.channel;
  const float* p = weights.at;
  for (std::int64_t t = span.begin; t < span.end; ++t, p += weights.stride) {
    const std::byte* v = tile.v.rows[t] + tile.v.offset_of(span.head);
    const Vec v_t = load_last_channels<T>(v, span.channel, channels);
    for (int r = 0; r < Rows; ++r) {
      float* sum = out + r * tile.out_stride;
      store(sum, fma(broadcast(p[r]), v_t, load(sum)));
    }
  }
}

/// Tokens [begin, end), all of which the rows see, of all channels.
template <class T, int Rows>
void add_rows(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  constexpr int kVectors = kDotSums / Rows;
  ValueSpan span{.head = head, .row = row, .begin = begin, .end = end,
                 .group = 0, .channel = 0};
  for (; span.group < tile.v.groups.count; ++span.group) {
    const std::int64_t last = tile.v.groups.end[span.group];
    float scaled[kStripTokens * Rows];
    const SpanWeights weights = weights_of<T, Rows>(tile, span, scaled);
    for (; last - span.channel >= kVectors * kLanes; span.channel += kVectors * kLanes) {
      add_tile<T, Rows, kVectors>(tile, span, weights);
    }
    for (; last - span.channel >= kLanes; span.channel += kLanes) {
      add_tile<T, Rows, 1>(tile, span, weights);
    }
    if (span.channel < last) add_rest<T, Rows>(tile, span, weights, last - span.channel);
    span.channel = last;
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
  UpcomingRows next(tile.v, tile.heads, tile.capacity);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    const std::int64_t rest = strip + kStripTokens;
    const std::int64_t strip_end = rest < tile.tokens ? rest : tile.tokens;
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      next.ask(kStripTokens * tile.v.head_bytes);
      add_strip<T>(tile, head, strip, strip_end);
    }
  }
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
