// Where the blocks that share a job meet, so that all of them merge their partial results.
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/ptx/barrier.cuh"

namespace fovea::cuda::split_kv {

/// A block's part of a merge: `index` of `count` equal ones; count 0: others do it all.
struct MergeShare {
  std::int32_t index, count;
};

/// What the blocks of one job have done, in one word that is 0 between launches. Run by one thread
/// of each of them.
///
/// A block that waits for another holds a multiprocessor that the other may need. So it waits only
/// once all have begun: those end, whatever else the device runs. Blocks that finish before, or
/// have another job to do, leave; those that stay share the merge, or the last to finish does it.
class Rendezvous {
 public:
  __device__ Rendezvous(std::uint64_t* word, std::int32_t blocks) : word_(word), blocks_(blocks) {}

  __device__ void begin() { ptx::count_relaxed(word_, std::uint64_t{1} << kBegun); }

  /// Whether the block may wait for the others.
  __device__ bool all_have_begun() const {
    return count(ptx::read_count_relaxed(word_), kBegun) == blocks_;
  }

  /// Comes back once all blocks have finished, if this one has a share of the merge. Orders what
  /// they did before a barrier of their own and this call before what this one does after it.
  __device__ MergeShare finish(bool stay) {
    const std::uint64_t step =
        (std::uint64_t{1} << kFinished) + (stay ? 0 : std::uint64_t{1} << kLeft);
    const std::uint64_t before = ptx::count_and_order(word_, step);
    std::uint64_t now = before + step;
    const bool last_alone = count(now, kLeft) == blocks_;
    if (!stay && !last_alone) return MergeShare{0, 0};
    while (count(now, kFinished) < blocks_) now = ptx::read_count_ordered(word_);
    return MergeShare{count(before, kFinished) - count(before, kLeft),
                      last_alone ? 1 : blocks_ - count(now, kLeft)};
  }

  /// To be called after finish(), by blocks that have a share: the word is not read any more. The
  /// answer, which takes a while and is never 0, is for clear().
  __device__ std::uint64_t retire() {
    return ptx::count_relaxed(word_, std::uint64_t{1} << kRetired);
  }

  /// The last one makes the word ready for the next launch.
  __device__ void clear(std::uint64_t retired, const MergeShare& share) {
    if (count(retired, kRetired) == share.count - 1) *word_ = 0;
  }

 private:
  /// Where 16-bit counts lie in the word.
  static constexpr int kBegun = 0, kFinished = 16, kLeft = 32, kRetired = 48;

  static __device__ std::int32_t count(std::uint64_t word, int at) {
    return static_cast<std::int32_t>(word >> at & 0xffff);
  }

  std::uint64_t* word_;
  std::int32_t blocks_;
};

}  // namespace fovea::cuda::split_kv
