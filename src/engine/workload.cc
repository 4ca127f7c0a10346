// Generated workloads, and the token ids of all workloads.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.h"
#include "engine/random.h"
#include "fovea/engine.h"

namespace fovea {
namespace {

using engine::draw;
using engine::Stream;

/// A log-normal distribution by its median and 90 % quantile, cut to [1, longest].
struct LogNormal {
  double median;
  double quantile90;
  double longest;

  std::int32_t sample(std::uint64_t bits) const {
    constexpr double kNormalQuantile90 = 1.2815515655446004;
    const double sigma = std::log(quantile90 / median) / kNormalQuantile90;
    const double length = median * std::exp(sigma * engine::to_normal(bits));
    return static_cast<std::int32_t>(std::clamp(std::round(length), 1.0, longest));
  }
};

// The cuts are the largest context lengths that chat services of such traffic offer; fewer than 2
// prompts in 10000 and 2 answers in 1000 reach them.
constexpr LogNormal kPrompt{1020, 2734, 16384};
constexpr LogNormal kAnswer{129, 424, 2048};

// System prompts: a third of the requests start with one, 8 requests use the same on average.
constexpr double kSharingPart = 1.0 / 3;
constexpr std::int64_t kRequestsPerGroup = 24;  // All requests, a third of which share.
constexpr std::int32_t kShortestPrefix = 128;
constexpr std::int32_t kLongestPrefix = 768;

}  // namespace

std::int32_t Workload::token_id(std::int64_t request, std::int64_t k,
                                std::int64_t vocab_size) const {
  FOVEA_CHECK(request >= 0 && request < static_cast<std::int64_t>(requests.size()),
              invalid_argument, "request is {}, must be in [0, {})", request, requests.size());
  FOVEA_CHECK(vocab_size >= 1, invalid_argument, "vocab_size is {}, must be at least 1",
              vocab_size);
  const RequestSpec& spec = requests[static_cast<std::size_t>(request)];
  const bool shared = spec.prefix_group >= 0 && k < spec.prefix_tokens;
  const Stream stream = shared ? Stream::shared_token : Stream::token;
  const auto owner = static_cast<std::uint64_t>(shared ? spec.prefix_group : request);
  const std::uint64_t bits = draw(seed, stream, owner, static_cast<std::uint64_t>(k));
  return static_cast<std::int32_t>(engine::to_range(bits, static_cast<std::uint64_t>(vocab_size)));
}

Workload generate_workload(std::int64_t num_requests, std::uint64_t seed) {
  FOVEA_CHECK(num_requests >= 0, invalid_argument, "num_requests is {}, must be at least 0",
              num_requests);
  Workload workload{"generated", seed, {}};
  workload.requests.resize(static_cast<std::size_t>(num_requests));
  const auto num_groups =
      static_cast<std::uint64_t>(std::max<std::int64_t>(1, num_requests / kRequestsPerGroup));
  double arrival_s = 0;
  for (std::uint64_t i = 0; i < workload.requests.size(); ++i) {
    RequestSpec& spec = workload.requests[i];
    spec.prompt_tokens = kPrompt.sample(draw(seed, Stream::length, i, 0));
    spec.answer_tokens = kAnswer.sample(draw(seed, Stream::length, i, 1));
    spec.arrival_s = arrival_s;
    arrival_s -= std::log(1 - engine::to_uniform(draw(seed, Stream::arrival, i)));
    if (engine::to_uniform(draw(seed, Stream::sharing, i, 0)) >= kSharingPart) continue;
    const std::uint64_t group = engine::to_range(draw(seed, Stream::sharing, i, 1), num_groups);
    const auto prefix = kShortestPrefix + static_cast<std::int32_t>(engine::to_range(
                                              draw(seed, Stream::sharing, group, 2),
                                              kLongestPrefix - kShortestPrefix + 1));
    spec.prefix_group = static_cast<std::int32_t>(group);
    spec.prefix_tokens = std::min(prefix, spec.prompt_tokens);
  }
  return workload;
}

}  // namespace fovea
