// Which keys a query sees, as data.
#pragma once

namespace fovea {

/// Part of a plan; the rules themselves are in src/variants.
struct AttentionVariant {
  /// The query at position p sees keys 0 to p. Query tokens are aligned to the end of the sequence:
  /// with more queries than keys the first see nothing. False: every query sees every key.
  bool causal = true;
  bool operator==(const AttentionVariant&) const = default;
};

}  // namespace fovea
