// From scores to weights, for tiles of any dtype.
// Included inside an instruction set's unit.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// cap * tanh(y), y = score / cap, by tanh(y) = sign(y) (1 - 2^-2cy) / (1 + 2^-2cy) with
/// c = log2(e). That difference loses 2^-24 of the cap, which may be far larger than the score: up
/// to |y| = 1/4, where it would be 2^-22 of the result, the series score * (1 - y^2/3 + 2 y^4/15 -
/// 17 y^6/315 + 62 y^8/2835), whose next term is below 1e-8.
void cap_scores(const ScoreBlock& block) {
  const Vec zero = broadcast(0.f);
  const Vec one = broadcast(1.f);
  const Vec cap = broadcast(block.soft_cap);
  // Finite for a subnormal cap too, so that a score of 0 stays 0; an infinite one leaves scores.
  const float inverse = 1.f / block.soft_cap;
  const Vec scale = broadcast(inverse < 1e38f ? inverse : 1e38f);
  const Vec slope = mul(scale, broadcast(-2.f * 1.44269504f));
  const std::int64_t row_vectors = (block.rows + kLanes - 1) / kLanes;
  for (std::int64_t j = 0; j < row_vectors; ++j) {
    float* scores = block.scores + j * block.capacity * kLanes;
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      const Vec s = load(scores + t * kLanes);
      const Vec magnitude = select(less(s, zero), sub(zero, s), s);
      const Vec decay = exp2_nonpositive(mul(magnitude, slope));
      const Vec capped = mul(cap, div(sub(one, decay), add(one, decay)));
      const Vec far = select(less(s, zero), sub(zero, capped), capped);
      const Vec y = mul(s, scale);
      const Vec square = mul(y, y);
      Vec near = fma(square, broadcast(62.f / 2835), broadcast(-17.f / 315));
      near = fma(near, square, broadcast(2.f / 15));
      near = fma(near, square, broadcast(-1.f / 3));
      near = mul(s, fma(near, square, one));
      store(scores + t * kLanes, select(less(square, broadcast(1.f / 16)), near, far));
    }
  }
}

/// Scores that a row does not see become -inf, whatever they were. A border tile has few rows times
/// tokens for all the products that its scores took, so that one by one is fast enough.
void hide(const ScoreBlock& block) {
  const std::int64_t words = block.capacity / 64;
  for (std::int64_t r = 0; r < block.rows; ++r) {
    float* scores = block.scores + r / kLanes * (block.capacity * kLanes) + r % kLanes;
    for (std::int64_t w = 0; 64 * w < block.tokens; ++w) {
      const std::int64_t left = block.tokens - 64 * w;
      std::uint64_t hidden = ~block.row_mask[r * words + w];
      if (left < 64) hidden &= ~(~std::uint64_t{0} << left);
      for (; hidden != 0; hidden &= hidden - 1) {
        scores[(64 * w + __builtin_ctzll(hidden)) * kLanes] = -__builtin_inff();
      }
    }
  }
}

/// Scores of one row vector become weights; its maximum and sum advance. Returns what the weights
/// and values so far shrink by.
FOVEA_INLINE Vec weigh_vector(const ScoreBlock& block, std::int64_t row_vector) {
  const Vec none = broadcast(-__builtin_inff());
  float* scores = block.scores + row_vector * block.capacity * kLanes;  // [tokens][lanes]
  float* row_max = block.row_max + row_vector * kLanes;
  float* row_sum = block.row_sum + row_vector * kLanes;

  const Vec old_max = load(row_max);
  Vec new_max = old_max;
  for (std::int64_t t = 0; t < block.tokens; ++t) new_max = max(load(scores + t * kLanes), new_max);
  // Rows that have seen no key yet: any finite number instead of -inf - -inf.
  const Vec origin = select(less(none, new_max), new_max, broadcast(0.f));
  const Vec correction = exp2_nonpositive(sub(old_max, origin));
  Vec sum = mul(load(row_sum), correction);
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    const Vec weight = exp2_nonpositive(sub(load(scores + t * kLanes), origin));
    sum = add(sum, weight);
    store(scores + t * kLanes, weight);
  }
  store(row_max, new_max);
  store(row_sum, sum);
  return correction;
}

/// Scores of the block become weights, lane-wise. `correction` [row vectors][lanes] is what the
/// sums of values so far shrink by.
void weigh(const ScoreBlock& block, float* correction) {
  if (block.soft_cap > 0.f) cap_scores(block);
  if (block.row_mask) hide(block);
  const std::int64_t row_vectors = (block.rows + kLanes - 1) / kLanes;
  for (std::int64_t j = 0; j < row_vectors; ++j) {
    store(correction + j * kLanes, weigh_vector(block, j));
  }
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
