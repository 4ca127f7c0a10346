// Which drafted tokens are right: a seeded stand-in for a draft model.
#pragma once

#include <cstdint>

#include "engine/random.h"

namespace fovea::engine {

struct Drafts {
  std::int64_t max_tokens = 0;  ///< Behind the known token of a decode.
  double acceptance = 0;
  std::uint64_t seed = 0;

  /// Whether the token drafted for `position` of `request` is the workload's, whoever drafts it
  /// from which step.
  bool is_right(std::int64_t request, std::int64_t position) const {
    return to_uniform(draw(seed, Stream::draft, static_cast<std::uint64_t>(request),
                           static_cast<std::uint64_t>(position))) < acceptance;
  }
  /// Of `drafted` tokens from `position` on, those before the first wrong one.
  std::int64_t accepted(std::int64_t request, std::int64_t position, std::int64_t drafted) const {
    std::int64_t count = 0;
    while (count < drafted && is_right(request, position + count)) ++count;
    return count;
  }
};

/// A token that is not `token_id`; with a vocabulary of one there is no other.
inline std::int32_t wrong_token(std::int32_t token_id, std::int64_t vocab_size) {
  return static_cast<std::int32_t>((std::int64_t{token_id} + 1) % vocab_size);
}

}  // namespace fovea::engine
