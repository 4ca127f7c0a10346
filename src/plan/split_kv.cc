// Cuts decode work into items, so that every worker has the same amount.
//
// The work of a batch is a line: requests one after the other, each as long as its keys times its
// query rows. Keys that no query sees, before all windows, are no work. It may be cut between
// requests and at tiles of keys; worker w gets the stretch between cuts w and w + 1. The largest
// stretch is what a step waits for, so the smallest possible one is looked for first; then, among
// all ways to cut the line into such stretches, one with few requests split, since each split costs
// a merge.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "fovea/plan.h"
#include "plan/extents.h"
#include "plan/lengths.h"

namespace fovea {
namespace {

// A worker may get 1/32 more than its share where that saves splits: well inside the tenth that
// uneven work may cost, and no more than what threads differ by anyway.
constexpr std::int64_t kSlackDivisor = 32;

/// The line of work and where it may be cut.
class WorkLine {
 public:
  WorkLine(std::span<const std::int32_t> query_start_loc, std::vector<std::int64_t> num_keys,
           std::int64_t kv_tile)
      : query_start_loc_(query_start_loc), num_keys_(std::move(num_keys)), kv_tile_(kv_tile) {
    borders_.reserve(num_keys_.size() + 1);
    borders_.push_back(0);
    for (std::size_t i = 0; i < num_keys_.size(); ++i) {
      const std::int64_t work = rows(i) * num_keys_[i];
      FOVEA_CHECK(work <= std::numeric_limits<std::int64_t>::max() / 4 - borders_.back(),
                  invalid_argument, "seq_lens[{}] is {}: the batch's work must stay below 2^61", i,
                  num_keys_[i]);
      borders_.push_back(borders_.back() + work);
      const std::int64_t last_piece = num_keys_[i] - max_tiles(i) * kv_tile;
      longest_gap_ = std::max(longest_gap_, rows(i) * std::max(last_piece, kv_tile));
    }
  }

  std::int64_t length() const { return borders_.back(); }
  /// No two cuts that follow each other lie further apart.
  std::int64_t longest_gap() const { return longest_gap_; }
  std::int64_t rows(std::size_t request) const {
    return std::int64_t{query_start_loc_[request + 1]} - query_start_loc_[request];
  }

  /// The last cut at or before `position`, the first at or after it. 0 <= position <= length().
  std::int64_t cut_at_most(std::int64_t position) const {
    const std::size_t request = request_at(position);
    if (request == num_keys_.size()) return length();
    const std::int64_t tiles = (position - borders_[request]) / tile_work(request);
    return borders_[request] + std::min(tiles, max_tiles(request)) * tile_work(request);
  }
  std::int64_t cut_at_least(std::int64_t position) const {
    const std::size_t request = request_at(position);
    if (request == num_keys_.size()) return length();
    const std::int64_t work = tile_work(request);
    const std::int64_t tiles = (position - borders_[request] + work - 1) / work;
    return tiles <= max_tiles(request) ? borders_[request] + tiles * work : borders_[request + 1];
  }

  /// A cut in [least, most], which holds one: between requests if it can be, and as near to `ideal`
  /// as it can.
  std::int64_t best_cut(std::int64_t least, std::int64_t most, std::int64_t ideal) const {
    ideal = std::clamp(ideal, least, most);
    const auto after = std::lower_bound(borders_.begin(), borders_.end(), ideal);
    std::int64_t below = after == borders_.begin() ? *after : *(after - 1);
    std::int64_t above = *after;
    if (below < least && above > most) {
      below = cut_at_most(ideal);
      above = cut_at_least(ideal);
    }
    if (below < least) return above;
    if (above > most) return below;
    return ideal - below <= above - ideal ? below : above;
  }

 private:
  /// The request whose stretch [begin, end) holds `position`; their number at the line's end.
  std::size_t request_at(std::int64_t position) const {
    const auto after = std::upper_bound(borders_.begin(), borders_.end(), position);
    return static_cast<std::size_t>(after - borders_.begin()) - 1;
  }
  std::int64_t tile_work(std::size_t request) const { return rows(request) * kv_tile_; }
  /// Tiles that may lie before a cut: the piece behind it has a whole one as well.
  std::int64_t max_tiles(std::size_t request) const {
    return std::max<std::int64_t>(num_keys_[request] / kv_tile_ - 1, 0);
  }

  std::span<const std::int32_t> query_start_loc_;
  std::vector<std::int64_t> num_keys_;  ///< [requests] that are work.
  std::int64_t kv_tile_;
  std::vector<std::int64_t> borders_;  ///< [requests + 1] where each request's work starts.
  std::int64_t longest_gap_ = 0;
};

/// least[w] is the first cut from which workers w and up reach the line's end with `capacity` each.
/// False when worker 0 would have to start behind the line's begin.
bool reach_back(const WorkLine& line, std::int64_t capacity, std::vector<std::int64_t>& least) {
  std::int64_t position = line.length();
  least.back() = position;
  for (std::size_t w = least.size() - 1; w-- > 0;) {
    position = position <= capacity ? 0 : line.cut_at_least(position - capacity);
    least[w] = position;
  }
  return position == 0;
}

/// Cuts [workers + 1] of the line.
std::vector<std::int64_t> cut_evenly(const WorkLine& line, std::int32_t num_workers) {
  const std::int64_t share = (line.length() + num_workers - 1) / num_workers;
  std::vector<std::int64_t> least(static_cast<std::size_t>(num_workers) + 1);
  std::int64_t capacity = share + share / kSlackDivisor;
  if (!reach_back(line, capacity, least)) {
    // With a share and a gap each, every worker can take a whole share: that is enough.
    std::int64_t too_small = capacity;
    capacity = share + line.longest_gap();
    while (capacity - too_small > 1) {
      const std::int64_t middle = too_small + (capacity - too_small) / 2;
      if (reach_back(line, middle, least)) {
        capacity = middle;
      } else {
        too_small = middle;
      }
    }
    reach_back(line, capacity, least);
  }
  std::vector<std::int64_t> cuts(least.size());
  cuts.back() = line.length();
  for (std::size_t w = 1; w + 1 < cuts.size(); ++w) {
    const std::int64_t most = line.cut_at_most(std::min(cuts[w - 1] + capacity, line.length()));
    // Shares of whole numbers: never more than the exact ideal, without its overflow.
    const auto done = static_cast<std::int64_t>(w);
    const std::int64_t ideal =
        line.length() / num_workers * done + line.length() % num_workers * done / num_workers;
    cuts[w] = line.best_cut(std::max(least[w], cuts[w - 1]), most, ideal);
  }
  return cuts;
}

/// Ends a request whose items start at `first`: several are partials.
void number_partials(DecodeSchedule& schedule, std::size_t first) {
  std::vector<WorkItem>& items = schedule.items;
  std::int32_t partial = schedule.partial_begin.back();
  if (items.size() - first > 1) {
    for (std::size_t i = first; i < items.size(); ++i) items[i].partial = partial++;
  }
  schedule.partial_begin.push_back(partial);
}

/// Appends items to a schedule, request after request.
class ItemWriter {
 public:
  ItemWriter(DecodeSchedule& schedule, std::vector<std::int64_t> cuts)
      : schedule_(schedule), cuts_(std::move(cuts)) {
    schedule_.worker_begin.assign(cuts_.size(), 0);
    schedule_.partial_begin.push_back(0);
  }

  void append(std::int32_t request, std::int64_t rows, std::int32_t first_key,
              std::int32_t seq_len) {
    std::vector<WorkItem>& items = schedule_.items;
    const std::size_t first = items.size();
    if (rows > 0 && seq_len == 0) items.push_back({request, 0, 0, -1});
    for (std::int32_t begin = first_key; rows > 0 && begin < seq_len;) {
      while (cuts_[worker_ + 1] == position_) start_worker();
      const std::int64_t free = (cuts_[worker_ + 1] - position_) / rows;
      const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(begin + free, seq_len));
      items.push_back({request, begin, end, -1});
      position_ += (end - begin) * rows;
      begin = end;
    }
    number_partials(schedule_, first);
  }

  void finish() {
    while (worker_ + 1 < cuts_.size()) start_worker();
  }

 private:
  void start_worker() {
    schedule_.worker_begin[++worker_] = static_cast<std::int32_t>(schedule_.items.size());
  }

  DecodeSchedule& schedule_;
  const std::vector<std::int64_t> cuts_;
  std::size_t worker_ = 0;
  std::int64_t position_ = 0;
};

/// Appends items that end at multiples of kInvariantSplitKeys, request after request, then deals
/// them to workers as they come.
class InvariantItemWriter {
 public:
  InvariantItemWriter(DecodeSchedule& schedule, std::int32_t num_workers)
      : schedule_(schedule), num_workers_(num_workers) {
    schedule_.partial_begin.push_back(0);
  }

  void append(std::int32_t request, std::int64_t rows, std::int32_t first_key,
              std::int32_t seq_len) {
    std::vector<WorkItem>& items = schedule_.items;
    const std::size_t first = items.size();
    if (rows > 0 && seq_len == 0) items.push_back({request, 0, 0, -1});
    for (std::int32_t begin = first_key; rows > 0 && begin < seq_len;) {
      const std::int32_t rest = kInvariantSplitKeys - begin % kInvariantSplitKeys;
      const std::int32_t end = seq_len - begin > rest ? begin + rest : seq_len;
      items.push_back({request, begin, end, -1});
      work_.push_back(rows * (end - begin));
      begin = end;
    }
    work_.resize(items.size(), 0);
    number_partials(schedule_, first);
  }

  /// Worker w starts with the first item whose work lies behind its share of all.
  void finish() {
    const double share =
        std::accumulate(work_.begin(), work_.end(), 0.0) / static_cast<double>(num_workers_);
    schedule_.worker_begin.assign(1, 0);
    double done = 0;
    for (std::size_t i = 0; i < work_.size(); ++i) {
      while (std::ssize(schedule_.worker_begin) < num_workers_ &&
             done >= share * static_cast<double>(schedule_.worker_begin.size())) {
        schedule_.worker_begin.push_back(static_cast<std::int32_t>(i));
      }
      done += static_cast<double>(work_[i]);
    }
    schedule_.worker_begin.resize(static_cast<std::size_t>(num_workers_) + 1,
                                  static_cast<std::int32_t>(work_.size()));
  }

 private:
  DecodeSchedule& schedule_;
  std::int32_t num_workers_;
  std::vector<std::int64_t> work_;  ///< Of each item.
};

/// Start of the tile with the first key that a query of the sequence sees.
std::int32_t first_tile(const AttentionVariant& variant, const SequenceExtent& extent,
                        std::int64_t kv_tile) {
  if (extent.num_queries == 0) return 0;
  const KeyInterval keys = visible_to_any(variant, {0, extent.num_queries}, extent);
  return static_cast<std::int32_t>(keys.begin / kv_tile * kv_tile);
}

void check_draft_tree(std::span<const std::int32_t> query_start_loc,
                      std::span<const std::int32_t> seq_lens,
                      std::span<const std::uint64_t> draft_tree, const AttentionVariant& variant) {
  if (draft_tree.empty()) return;
  FOVEA_CHECK(std::ssize(draft_tree) == query_start_loc.back(), invalid_argument,
              "draft_tree has {} entries, must have {}, one per query token, or 0",
              draft_tree.size(), query_start_loc.back());
  FOVEA_CHECK(variant.causal, unsupported,
              "draft_tree is given without variant.causal, must go with it");
  for (std::size_t r = 0; r + 1 < query_start_loc.size(); ++r) {
    const std::int32_t first = query_start_loc[r];
    const std::int32_t query_len = query_start_loc[r + 1] - first;
    FOVEA_CHECK(query_len <= 64, unsupported,
                "draft_tree of request {} has {} tokens, must have at most 64", r, query_len);
    FOVEA_CHECK(seq_lens[r] >= query_len, invalid_argument,
                "seq_lens[{}] is {}, must be at least {}, the tokens of its draft_tree", r,
                seq_lens[r], query_len);
    for (std::int32_t i = 0; i < query_len; ++i) {
      const std::uint64_t self = std::uint64_t{1} << i;
      const std::uint64_t seen = draft_tree[static_cast<std::size_t>(first + i)];
      FOVEA_CHECK((seen & self) != 0 && (seen & ~(self | (self - 1))) == 0, invalid_argument,
                  "draft_tree of request {}, token {} is {:#x}, must have its own bit {} and only "
                  "bits of tokens before it",
                  r, i, seen, i);
    }
  }
}

}  // namespace

DecodeSchedule schedule_decode(std::span<const std::int32_t> query_start_loc,
                               std::span<const std::int32_t> seq_lens, const PlanTarget& target,
                               const AttentionVariant& variant,
                               std::span<const std::uint64_t> draft_tree) {
  check_offsets("query_start_loc", query_start_loc);
  check_lengths("seq_lens", seq_lens);
  FOVEA_CHECK(query_start_loc.size() == seq_lens.size() + 1, invalid_argument,
              "query_start_loc has {} entries, must have {}: one more than seq_lens",
              query_start_loc.size(), seq_lens.size() + 1);
  check_range("num_workers", target.num_workers, 1, std::int64_t{1} << 20);
  check_range("decode_kv_tile", target.decode_kv_tile, 1, std::int64_t{1} << 20);

  check_variant(variant);
  check_draft_tree(query_start_loc, seq_lens, draft_tree, variant);

  DecodeSchedule schedule;
  schedule.query_start_loc.assign(query_start_loc.begin(), query_start_loc.end());
  schedule.seq_lens.assign(seq_lens.begin(), seq_lens.end());
  schedule.draft_tree.assign(draft_tree.begin(), draft_tree.end());
  std::vector<std::int32_t> first_keys;
  std::vector<std::int64_t> num_keys;
  first_keys.reserve(seq_lens.size());
  num_keys.reserve(seq_lens.size());
  for (std::size_t i = 0; i < seq_lens.size(); ++i) {
    const SequenceExtent extent = extent_of(schedule, static_cast<std::int32_t>(i));
    first_keys.push_back(first_tile(variant, extent, target.decode_kv_tile));
    num_keys.push_back(std::int64_t{seq_lens[i]} - first_keys.back());
  }
  const WorkLine line(query_start_loc, std::move(num_keys), target.decode_kv_tile);
  schedule.items.reserve(seq_lens.size() + static_cast<std::size_t>(target.num_workers));
  schedule.partial_begin.reserve(seq_lens.size() + 1);
  const auto write = [&](auto&& writer) {
    for (std::size_t i = 0; i < seq_lens.size(); ++i) {
      const std::int64_t rows = line.rows(i);
      schedule.max_query_len = std::max(schedule.max_query_len, static_cast<std::int32_t>(rows));
      writer.append(static_cast<std::int32_t>(i), rows, first_keys[i], seq_lens[i]);
    }
    writer.finish();
  };
  if (target.batch_invariant) {
    write(InvariantItemWriter(schedule, target.num_workers));
  } else {
    write(ItemWriter(schedule, cut_evenly(line, target.num_workers)));
  }
  return schedule;
}

}  // namespace fovea
