// Attention of few rows per key head: keys and values are converted in registers, where they lie.
// Included inside an instruction set's unit.
//
//   S[token][row] = K[token][:] . Q[row][:]        lanes are channels, summed up at the end
//   P             = softmax-inl.h                  lanes are the rows of all heads
//   O[row][:]     = O[row][:] * correction + P V   lanes are channels
//
// A query head that shares its keys with few others would leave most lanes of a row vector empty,
// and a copy of the tile would cost more than what is done with it. What limits such rows is
// reading: so all heads take a tile before the next one, since they lie next to each other, and
// what is read next is asked for meanwhile.
//
// Every sum runs over its index in order, whatever the register tile: a row's bits do not depend on
// the rows that it is computed with.
#include <utility>

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// Tokens of all heads that are scored before the next ones.
constexpr std::int64_t kStripTokens = 32;
static_assert(kTileTokens % kStripTokens == 0 && kStripTokens % kDotSums == 0);

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

/// Vectors of channels that are loaded together. Those of bf16 have the even channels and the odd
/// ones, for which a shift or a mask is enough; queries lie in the same order.
template <class T>
constexpr int kBundle = __is_same(T, BFloat16) ? 2 : 1;

/// Vector j of those from channel c on, which are whole bundles.
template <class T>
FOVEA_INLINE Vec load_bundled(const std::byte* head, std::int64_t c, int j) {
  if constexpr (kBundle<T> == 2) {
    const T* bundle = reinterpret_cast<const T*>(head) + c + j / 2 * (2 * kLanes);
    return j % 2 == 0 ? load_even(bundle) : load_odd(bundle);
  } else {
    return load_channels<T>(head, c + j * kLanes);
  }
}

/// Channels [c, c + n), n <= kLanes, and zeros.
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

/// Asks for rows that are needed soon, line by line in the order of the memory and at the pace of
/// the work on others: for the values of a tile while its keys are at work, for the next tile's
/// keys while its values are. Measured faster than bursts, since loads wait behind those, and than
/// asking a tile earlier.
class RowsAhead {
 public:
  static constexpr std::int64_t kLine = 64;

  /// `rows` [count] of `layout`; nullptr: none.
  RowsAhead(const StoredRows& layout, const std::byte* const* rows, std::int64_t count,
            std::int64_t heads)
      : row_(rows),
        last_(rows ? rows + count : rows),
        head_at_(layout.head_at),
        bytes_(heads * layout.head_bytes) {}

  /// For as much as kBytes of the rows at work are.
  template <std::int64_t kBytes>
  FOVEA_INLINE void ask() {
    if constexpr (kBytes < kLine) {
      due_ += kBytes;
      if (due_ < kLine) return;
      due_ = 0;
    }
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kBytes; i += kLine) ask_line();
  }
  /// For what is left.
  void ask_rest() {
    while (ask_line()) {
    }
  }

 private:
  FOVEA_INLINE bool ask_line() {
    if (line_ >= end_) {
      if (row_ == last_) return false;
      line_ = *row_++ + head_at_;
      end_ = line_ + bytes_;
    }
    __builtin_prefetch(line_, 0, 2);
    line_ += kLine;
    return true;
  }

  const std::byte* line_ = nullptr;
  const std::byte* end_ = nullptr;  ///< Of the row.
  const std::byte* const* row_;     ///< That comes then.
  const std::byte* const* last_;
  std::int64_t head_at_;
  std::int64_t bytes_;
  std::int64_t due_ = 0;
};

FOVEA_INLINE RowsAhead values_ahead(const InPlaceTile& tile) {
  return {tile.v, tile.asks_for_values ? tile.v.rows : nullptr, tile.tokens, tile.heads};
}
FOVEA_INLINE RowsAhead keys_ahead(const InPlaceTile& tile) {
  return {tile.k, tile.next_keys, tile.num_next_keys, tile.heads};
}

FOVEA_INLINE float float_at(const std::byte* p) {
  float value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

/// Of a head that has it.
FOVEA_INLINE float stored_scale(const StoredRows& rows, const std::byte* head, int group) {
  return float_at(head + rows.scales_at + group * std::int64_t{sizeof(float)});
}
FOVEA_INLINE float scale_of(const StoredRows& rows, const std::byte* head, int group) {
  return rows.scales_at < 0 ? rows.scale : stored_scale(rows, head, group);
}

FOVEA_INLINE float* score_at(const ScoreBlock& block, std::int64_t row, std::int64_t token) {
  return block.scores + (row / kLanes * block.capacity + token) * kLanes + row % kLanes;
}

/// Keys of the tokens of a register tile: a head of each, and channels from `begin` on of a group.
struct KeySpan {
  const std::byte* heads[kDotSums];
  std::int64_t row;
  std::int64_t token;
  int group;
  std::int64_t begin;
};

/// dots[t * Rows + r] times the scale of token t becomes, or from the second span on is added to,
/// the score of row r and token t of Tokens.
template <class T, int Rows, int Tokens>
FOVEA_INLINE void add_dots(const InPlaceTile& tile, const KeySpan& span, const float* dots) {
  typedef float Row __attribute__((vector_size(sizeof(float) * Rows)));
  float* scores = score_at(tile, span.row, span.token);
  const StoredRows keys = tile.k;  // Nothing that is written is part of these.
  const int group = span.group;
  const bool adds = span.begin > 0;
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) {
    Row score, before;
    __builtin_memcpy(&score, dots + t * Rows, sizeof score);
    if constexpr (kHasScales<T>) score *= scale_of(keys, span.heads[t], group);
    if (adds) {
      __builtin_memcpy(&before, scores + t * kLanes, sizeof before);
      score += before;
    }
    __builtin_memcpy(scores + t * kLanes, &score, sizeof score);
  }
}

/// The same of sums[t * Rows + r] over their lanes.
template <class T, int Rows>
FOVEA_INLINE void add_sums(const InPlaceTile& tile, const KeySpan& span,
                           const Vec (&sums)[kDotSums]) {
  static_assert(kDotSums % kLanes == 0);
  float dots[kDotSums];
#pragma GCC unroll 4
  for (int i = 0; i < kDotSums; i += kLanes) {
    Vec whole[kLanes];
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) whole[l] = sums[i + l];
    store(dots + i, sums_of_lanes(whole));
  }
  add_dots<T, Rows, kDotSums / Rows>(tile, span, dots);
}

/// The last channels of a group, less than a bundle of them. Rare, and not worth its code in
/// the register tile: a call there would keep the sums in memory.
template <class T, int Rows>
[[gnu::noinline]] void dot_rest(const InPlaceTile& tile, const KeySpan& span, std::int64_t end) {
  const float* q = tile.q + span.row * tile.q_stride;
  Vec sum[kDotSums];
  for (int i = 0; i < kDotSums; ++i) {
    sum[i] = broadcast(0.f);
    for (std::int64_t c = span.begin; c < end; c += kLanes) {
      const std::int64_t count = end - c < kLanes ? end - c : kLanes;
      const Vec k_t = load_last_channels<T>(span.heads[i / Rows], c, count);
      sum[i] = fma(k_t, load(q + i % Rows * tile.q_stride + c), sum[i]);
    }
  }
  add_sums<T, Rows>(tile, span, sum);
}

/// Whole bundles of channels up to `end`. Registers: kDotSums sums, Rows vectors of Q, one of K.
template <class T, int Rows>
FOVEA_INLINE void dot_whole(const InPlaceTile& tile, const KeySpan& span, std::int64_t end,
                            RowsAhead& next) {
  const float* q = tile.q + span.row * tile.q_stride;
  Vec sum[kDotSums];
#pragma GCC unroll 16
  for (int i = 0; i < kDotSums; ++i) sum[i] = broadcast(0.f);
  RowsAhead ahead = next;  // In registers.
  // One vector of the bundles after the other: keeping both would take registers from the sums.
#pragma GCC unroll 2
  for (int j = 0; j < kBundle<T>; ++j) {
    for (std::int64_t c = span.begin; c < end; c += kBundle<T> * kLanes) {
      ahead.ask<kDotSums / Rows * kLanes * kElementBits<T> / 8>();
      Vec q_c[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) q_c[r] = load(q + r * tile.q_stride + c + j * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < kDotSums / Rows; ++t) {
        const Vec k_t = load_bundled<T>(span.heads[t], c, j);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sum[t * Rows + r] = fma(k_t, q_c[r], sum[t * Rows + r]);
      }
    }
  }
  next = ahead;
  add_sums<T, Rows>(tile, span, sum);
}

template <class T, int Rows>
FOVEA_INLINE void dot_tile(const InPlaceTile& tile, std::int64_t head, std::int64_t row,
                           std::int64_t token, RowsAhead& next) {
  const StoredRows& keys = tile.k;
  KeySpan span{.heads = {}, .row = row, .token = token, .group = 0, .begin = 0};
#pragma GCC unroll 16
  for (int t = 0; t < kDotSums / Rows; ++t) {
    span.heads[t] = keys.rows[token + t] + keys.offset_of(head);
  }
  for (; span.group < keys.groups.count; ++span.group) {
    const std::int64_t end = keys.groups.end[span.group];
    constexpr std::int64_t kChannels = kBundle<T> * kLanes;
    const std::int64_t whole = span.begin + (end - span.begin) / kChannels * kChannels;
    if (span.begin < whole) dot_whole<T, Rows>(tile, span, whole, next);
    span.begin = whole;
    if (whole < end) dot_rest<T, Rows>(tile, span, end);
    span.begin = end;
  }
}

/// Whole register tiles of tokens of a strip: nobody looks at those behind the last.
template <class T, int Rows>
void dot_strip(const InPlaceTile& tile, std::int64_t head, std::int64_t row, std::int64_t strip,
               RowsAhead& next) {
  for (std::int64_t t = strip; t < strip + kStripTokens && t < tile.tokens; t += kDotSums / Rows) {
    dot_tile<T, Rows>(tile, head, row, t, next);
  }
}

template <class T>
void score_in_place(const InPlaceTile& tile) {
  RowsAhead next = values_ahead(tile);
  for (std::int64_t strip = 0; strip < tile.tokens; strip += kStripTokens) {
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      std::int64_t row = head * tile.head_stride;
      const std::int64_t end = row + tile.head_rows;
      for (; row + 4 <= end; row += 4) dot_strip<T, 4>(tile, head, row, strip, next);
      for (; row + 2 <= end; row += 2) dot_strip<T, 2>(tile, head, row, strip, next);
      if (row < end) dot_strip<T, 1>(tile, head, row, strip, next);
    }
  }
  next.ask_rest();
}

/// Values of tokens [begin, end) of a head, channels from `channel` on of a group, and rows from
/// `row` of the block on. Sums of such a span are added up before they are added to the output.
struct ValueSpan {
  std::int64_t head;
  std::int64_t row;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t channel;
};

/// Weights of a tile [row vectors][capacity][lanes]: as they are, or times the scales of a group of
/// the values.
struct TileWeights {
  const float* at;
  std::int64_t capacity;
  const float* of(std::int64_t row, std::int64_t token) const {
    return at + (row / kLanes * capacity + token) * kLanes + row % kLanes;
  }
};

template <int kCount>
struct Floats {
  typedef float Type __attribute__((vector_size(sizeof(float) * kCount)));
};

/// The floats at row + at[h] of kHeads heads, each in as many neighbouring lanes.
template <int kHeads, int... Lane>
FOVEA_INLINE Vec spread(const std::byte* row, const std::int64_t (&at)[kHeads],
                        std::integer_sequence<int, Lane...>) {
  if constexpr (kHeads == 1) {
    return broadcast(float_at(row + at[0]));
  } else {
    typename Floats<kHeads>::Type few = {};  // In a register: a load would wait for several stores.
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; ++h) few[h] = float_at(row + at[h]);
    const auto again = (Vec)repeat_words<kHeads>(&few);
    return (Vec)__builtin_shufflevector(again, again, (Lane / (kLanes / kHeads))...);
  }
}

/// The row vector's weights, from `weights` on, times the scales of a group of the values of the
/// kHeads heads from `first` on that share it. Asks for a line with each vector, lest memory wait
/// for the products.
template <int kHeads>
void scale_vector(const InPlaceTile& tile, std::int64_t first, int group, const float* weights,
                  float* scaled, RowsAhead& next) {
  const StoredRows values = tile.v;
  const std::int64_t group_at = values.scales_at + group * std::int64_t{sizeof(float)};
  std::int64_t at[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t head = first + h < tile.heads ? first + h : tile.heads - 1;
    at[h] = values.offset_of(head) + group_at;
  }
  RowsAhead ahead = next;  // In registers.
  for (std::int64_t t = 0; t < tile.tokens; ++t, weights += kLanes, scaled += kLanes) {
    ahead.ask<RowsAhead::kLine>();
    const Vec scales = spread(values.rows[t], at, std::make_integer_sequence<int, kLanes>());
    store(scaled, mul(load(weights), scales));
  }
  next = ahead;
}

/// Weights times the scales of a group of the values: [row vectors][kTileTokens][lanes].
void scale_weights(const InPlaceTile& tile, int group, float* scaled, RowsAhead& next) {
  for (std::int64_t row = 0; row < tile.rows; row += kLanes) {
    const float* weights = score_at(tile, row, 0);
    float* to = scaled + row * kTileTokens;
    if (tile.v.scales_at < 0) {
      const Vec scale = broadcast(tile.v.scale);
      for (std::int64_t i = 0; i < tile.tokens * kLanes; i += kLanes) {
        store(to + i, mul(load(weights + i), scale));
      }
      continue;
    }
    const std::int64_t first = row / tile.head_stride;
    switch (tile.head_stride) {
      case 1:
        scale_vector<kLanes>(tile, first, group, weights, to, next);
        break;
      case 2:
        scale_vector<kLanes / 2>(tile, first, group, weights, to, next);
        break;
      case 4:
        scale_vector<(kLanes > 4 ? kLanes / 4 : 1)>(tile, first, group, weights, to, next);
        break;
      case 8:
        scale_vector<(kLanes > 8 ? kLanes / 8 : 1)>(tile, first, group, weights, to, next);
        break;
      default:
        scale_vector<1>(tile, first, group, weights, to, next);
    }
  }
}

/// out[Rows][Vectors * lanes] += weights times values, of whole bundles. Registers: Rows x Vectors
/// sums, Vectors of V, one broadcast of P.
template <class T, int Rows, int Vectors>
FOVEA_INLINE void add_tile(const InPlaceTile& tile, const ValueSpan& span,
                           const TileWeights& weights, RowsAhead& next) {
  const StoredRows& values = tile.v;
  const std::int64_t head_at = values.offset_of(span.head);
  float* out = tile.out + span.row * tile.out_stride + span.channel;
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[r][j] = broadcast(0.f);
  }
  const float* p = weights.of(span.row, span.begin);
  RowsAhead ahead = next;  // In registers.
  for (std::int64_t t = span.begin; t < span.end; ++t, p += kLanes) {
    ahead.ask<Vectors * kLanes * kElementBits<T> / 8>();
    const std::byte* v = values.rows[t] + head_at;
    Vec v_t[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) v_t[j] = load_bundled<T>(v, span.channel, j);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec p_r = broadcast(p[r]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[r][j] = fma(p_r, v_t[j], sum[r][j]);
    }
  }
  next = ahead;
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    if constexpr (kBundle<T> == 2) {
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; j += 2) join_even_odd(&sum[r][j], &sum[r][j + 1]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      float* to = out + r * tile.out_stride + j * kLanes;
      store(to, add(load(to), sum[r][j]));
    }
  }
}

/// Channels [span.channel, end), the last of a group: as dot_rest.
template <class T, int Rows>
[[gnu::noinline]] void add_rest(const InPlaceTile& tile, const ValueSpan& span,
                                const TileWeights& weights, std::int64_t end) {
  for (std::int64_t c = span.channel; c < end; c += kLanes) {
    const std::int64_t count = end - c < kLanes ? end - c : kLanes;
    Vec sum[Rows];
    for (int r = 0; r < Rows; ++r) sum[r] = broadcast(0.f);
    const float* p = weights.of(span.row, span.begin);
    for (std::int64_t t = span.begin; t < span.end; ++t, p += kLanes) {
      const std::byte* v = tile.v.rows[t] + tile.v.offset_of(span.head);
      const Vec v_t = load_last_channels<T>(v, c, count);
      for (int r = 0; r < Rows; ++r) sum[r] = fma(broadcast(p[r]), v_t, sum[r]);
    }
    for (int r = 0; r < Rows; ++r) {
      float* out = tile.out + (span.row + r) * tile.out_stride + c;
      store(out, add(load(out), sum[r]));
    }
  }
}

/// Rows from span.row on, all of which see the tokens, and channels up to `end` of the group.
template <class T, int Rows>
void add_rows(const InPlaceTile& tile, ValueSpan span, std::int64_t end,
              const TileWeights& weights, RowsAhead& next) {
  constexpr int kVectors = kDotSums / Rows;
  for (; end - span.channel >= kVectors * kLanes; span.channel += kVectors * kLanes) {
    add_tile<T, Rows, kVectors>(tile, span, weights, next);
  }
  constexpr std::int64_t kChannels = kBundle<T> * kLanes;
  for (; end - span.channel >= kChannels; span.channel += kChannels) {
    add_tile<T, Rows, kBundle<T>>(tile, span, weights, next);
  }
  if (span.channel < end) add_rest<T, Rows>(tile, span, weights, end);
}

/// As add_rows, of the tokens that the row sees: a value is never multiplied by the weight 0 of a
/// row that does not see it, since it may be NaN.
template <class T>
void add_seen(const InPlaceTile& tile, const ValueSpan& all, std::int64_t end,
              const TileWeights& weights, RowsAhead& next) {
  ValueSpan span = all;
  while (span.begin < all.end) {
    const std::uint64_t seen = tile.row_mask[span.row] >> span.begin;
    if (seen == 0) return;
    span.begin += __builtin_ctzll(seen);
    const std::uint64_t hidden = ~(tile.row_mask[span.row] >> span.begin);  // The lowest bit is 0.
    const std::int64_t count = hidden == 0 ? kTileTokens : __builtin_ctzll(hidden);
    span.end = span.begin + count < all.end ? span.begin + count : all.end;
    if (span.begin < span.end) add_rows<T, 1>(tile, span, end, weights, next);
    span.begin = span.end;
  }
}

/// All rows of a head.
template <class T>
void add_head(const InPlaceTile& tile, ValueSpan span, std::int64_t end,
              const TileWeights& weights, RowsAhead& next) {
  const std::int64_t last = span.row + tile.head_rows;
  for (; tile.row_mask && span.row < last; ++span.row) add_seen<T>(tile, span, end, weights, next);
  for (; span.row + 4 <= last; span.row += 4) add_rows<T, 4>(tile, span, end, weights, next);
  for (; span.row + 2 <= last; span.row += 2) add_rows<T, 2>(tile, span, end, weights, next);
  if (span.row < last) add_rows<T, 1>(tile, span, end, weights, next);
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
  RowsAhead next = keys_ahead(tile);
  alignas(64) float scaled[kBlockRows * kTileTokens];
  std::int64_t channel = 0;
  for (int g = 0; g < tile.v.groups.count; ++g) {
    TileWeights weights{.at = tile.scores, .capacity = tile.capacity};
    if constexpr (kHasScales<T>) {
      scale_weights(tile, g, scaled, next);
      weights = {.at = scaled, .capacity = kTileTokens};
    }
    for (std::int64_t head = 0; head < tile.heads; ++head) {
      add_head<T>(tile, {.head = head, .row = head * tile.head_stride, .begin = 0,
                         .end = tile.tokens, .channel = channel},
                  tile.v.groups.end[g], weights, next);
    }
    channel = tile.v.groups.end[g];
  }
  next.ask_rest();
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
