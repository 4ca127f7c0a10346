// Cuts the contexts of a batch's prefills into pieces that fit the workspace.
#include "plan/context_spans.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

// Capacities up to 2^20 keep the alignment below 2^40.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 20;

void check_input(const ContextPlanInput& input) {
  check_lengths("context_lens", input.context_lens);
  check_range("workspace_rows", input.workspace_rows, 0, std::numeric_limits<std::int32_t>::max());
  check_range("block_size", input.block_size, 1, kMaxCapacity);
  if (!input.parallel) return;
  FOVEA_CHECK(input.kind == ContextPlanKind::packed, unsupported,
              "parallel is given with the {} context plan, must be used with the packed one",
              input.kind == ContextPlanKind::equal ? "equal" : "paged");
  check_range("parallel.ranks", input.parallel->ranks, 1, kMaxCapacity);
  check_range("parallel.interleave", input.parallel->interleave, 1,
              kMaxCapacity / input.parallel->ranks);
  check_range("parallel.rank", input.parallel->rank, 0, input.parallel->ranks - 1);
}

std::int64_t round_down(std::int64_t value, std::int64_t alignment) {
  return value / alignment * alignment;
}

/// Cuts contexts where the workspace ends.
class Packer {
 public:
  Packer(const ContextPlanInput& input, std::int64_t alignment)
      : input_(input),
        alignment_(alignment),
        row_budget_(row_budget(input)),
        max_split_(round_down(input.workspace_rows, alignment)) {}

  std::vector<std::vector<ContextSpan>> pack() {
    const auto num_requests = static_cast<std::int32_t>(input_.context_lens.size());
    std::vector<std::vector<ContextSpan>> chunks;
    start_request(0);
    while (request_ < num_requests) {
      if (!has_context()) {
        start_request(request_ + 1);
      } else {
        chunks.push_back(next_chunk(num_requests));
      }
    }
    return chunks;
  }

 private:
  void start_request(std::int32_t request) {
    request_ = request;
    if (request == std::ssize(input_.context_lens)) return;
    start_ = context_begin(input_, static_cast<std::size_t>(request));
  }
  bool has_context() const { return start_ < context_len(); }
  std::int64_t context_len() const {
    return input_.context_lens[static_cast<std::size_t>(request_)];
  }

  /// Whole contexts as long as they fit, then the longest piece of the next one that does.
  std::vector<ContextSpan> next_chunk(std::int32_t num_requests) {
    std::vector<ContextSpan> spans;
    std::int64_t free_rows = row_budget_;
    while (request_ < num_requests && has_context()) {
      const std::int64_t remaining = context_len() - start_;
      const std::int64_t rows = span_rows(input_, start_, remaining);
      if (rows > free_rows) {
        const std::int64_t split = longest_split(remaining, free_rows);
        if (split > 0) {
          append(spans, split);
          start_ += split;
        }
        break;
      }
      append(spans, remaining);
      free_rows -= rows;
      start_request(request_ + 1);
    }
    return spans;
  }

  /// The longest aligned piece that leaves something of the context and fills at most `free_rows`.
  std::int64_t longest_split(std::int64_t remaining, std::int64_t free_rows) const {
    std::int64_t fits = 0;
    std::int64_t most = std::min(max_split_, round_down(remaining - 1, alignment_)) / alignment_;
    while (fits < most) {
      const std::int64_t middle = (fits + most + 1) / 2;
      if (span_rows(input_, start_, middle * alignment_) <= free_rows) {
        fits = middle;
      } else {
        most = middle - 1;
      }
    }
    return fits * alignment_;
  }

  void append(std::vector<ContextSpan>& spans, std::int64_t seq_len) const {
    spans.push_back(
        {request_, static_cast<std::int32_t>(start_), static_cast<std::int32_t>(seq_len)});
  }

  const ContextPlanInput& input_;
  const std::int64_t alignment_;
  const std::int64_t row_budget_;
  const std::int64_t max_split_;
  std::int32_t request_ = 0;
  std::int64_t start_ = 0;  ///< Where the rest of `request_`'s context starts.
};

/// Piece i of every context is what its visible part has in [i * share, (i + 1) * share).
std::vector<std::vector<ContextSpan>> share_equally(const ContextPlanInput& input,
                                                    std::int64_t alignment) {
  const std::vector<std::int32_t>& lens = input.context_lens;
  std::int64_t sharing = 0, first = std::numeric_limits<std::int64_t>::max(), last = 0;
  for (std::size_t i = 0; i < lens.size(); ++i) {
    if (!sees_context(input, i)) continue;
    ++sharing;
    first = std::min(first, context_begin(input, i));
    last = std::max<std::int64_t>(last, lens[i]);
  }
  const std::int64_t share = round_down(input.workspace_rows / sharing, alignment);
  FOVEA_CHECK(share > 0, invalid_argument,
              "workspace_rows is {}, must be at least {}: {} rows of alignment for each of {} "
              "prefills with context",
              input.workspace_rows, sharing * alignment, alignment, sharing);
  std::vector<std::vector<ContextSpan>> chunks;
  for (std::int64_t start = round_down(first, share); start < last; start += share) {
    std::vector<ContextSpan>& spans = chunks.emplace_back();
    spans.reserve(lens.size());
    for (std::size_t i = 0; i < lens.size(); ++i) {
      const std::int64_t begin = std::clamp(context_begin(input, i), start, start + share);
      const std::int64_t end = std::clamp<std::int64_t>(lens[i], begin, start + share);
      spans.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(begin),
                       static_cast<std::int32_t>(end - begin)});
    }
  }
  return chunks;
}

}  // namespace

std::int64_t local_length(std::int64_t length, const ContextParallel& parallel, std::int32_t rank) {
  const std::int64_t turn = std::int64_t{parallel.ranks} * parallel.interleave;
  const std::int64_t rest = length % turn - std::int64_t{rank} * parallel.interleave;
  return length / turn * parallel.interleave +
         std::clamp<std::int64_t>(rest, 0, parallel.interleave);
}

std::int64_t padded_local_length(std::int64_t length, const ContextParallel& parallel) {
  const std::int64_t turn = std::int64_t{parallel.ranks} * parallel.interleave;
  return (length + turn - 1) / turn * parallel.interleave;
}

std::vector<std::vector<ContextSpan>> plan_context_spans(const ContextPlanInput& input) {
  check_input(input);
  if (input.kind == ContextPlanKind::paged) return {};
  bool has_context = false;
  for (std::size_t i = 0; i < input.context_lens.size(); ++i) {
    has_context = has_context || sees_context(input, i);
  }
  if (!has_context) return {};
  const std::int64_t alignment = split_alignment(input);
  FOVEA_CHECK(input.workspace_rows >= alignment, invalid_argument,
              "workspace_rows is {}, must be at least {}, the alignment of context chunks",
              input.workspace_rows, alignment);
  if (input.kind == ContextPlanKind::equal) return share_equally(input, alignment);
  return Packer(input, alignment).pack();
}

}  // namespace fovea
