// Which keys a query sees, and what becomes of their scores, as data.
#pragma once

#include <cstdint>

namespace fovea {

/// Part of a plan; the rules themselves are in src/variants. Positions are absolute: counted from
/// the start of the sequence. Rules combine: a key is seen when each of them lets it be seen.
///
/// Sinks (weights of a layer) and draft trees (part of a step) come as operands and plan data.
struct AttentionVariant {
  /// The query at position p sees keys 0 to p. Query tokens are aligned to the end of the sequence:
  /// with more queries than keys the first see nothing. False: every query sees every key.
  bool causal = true;
  /// The query at position p sees keys from p - window_left on, itself and window_left before it;
  /// negative: all. Nothing bounds the right, so a non-causal query sees all that follow.
  std::int64_t window_left = -1;
  /// The query at position p sees keys from p / attention_chunk * attention_chunk on; 0: all.
  /// Causal only.
  std::int64_t attention_chunk = 0;
  /// Scores s (sm_scale applied) become soft_cap * tanh(s / soft_cap), before any mask; 0: as they
  /// are. A sink is not capped.
  float soft_cap = 0.f;

  bool operator==(const AttentionVariant&) const = default;
};

/// `sliding_window` of a model's config counts the query itself; 0 or less means none.
constexpr std::int64_t window_left_of(std::int64_t sliding_window) {
  return sliding_window > 0 ? sliding_window - 1 : -1;
}

}  // namespace fovea
