// What the roles of a prefill block share: tile sizes, shared memory, the walk over keys.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/sm90/arithmetic.cuh"
#include "backends/cuda/sm90/attention_prefill/params.h"
#include "backends/cuda/sm90/ptx/barrier.cuh"
#include "backends/cuda/sm90/ptx/copy.cuh"
#include "variants/visibility.h"

namespace fovea::cuda::prefill {

constexpr int kQueryTile = 128;  ///< Query rows of a block, 64 for each warpgroup that computes.
constexpr int kComputeThreads = 256;
constexpr int kInspectThreads = 96;
constexpr int kThreads = kComputeThreads + 32 + kInspectThreads;  ///< One more warp loads.
constexpr int kStages = 2;                       ///< Key tiles, and value tiles, on their way.
constexpr int kComputeBarrier = 1;  ///< Named barriers; 0 is the whole block's.

/// Class of head widths: keys of up to kQk channels, values of up to kV.
template <typename Element, int kQk, int kVWidth>
struct Widths {
  using T = Element;
  static constexpr int kKeys = kQk == 256 ? 64 : 128;  ///< Keys of a tile.
  static constexpr int kQkChunks = kQk / 64;           ///< Tiles are chunks of 64 channels.
  static constexpr int kVChunks = kVWidth / 64;
  static constexpr int kV = kVWidth;
  static constexpr int kColumns = kV < 128 ? kV : 128;  ///< Of one output product.
  static constexpr int kParts = kV / kColumns;
  static constexpr int kQueryBytes = kQkChunks * kQueryTile * 128;
  /// Query tiles on their way: as many as fit.
  static constexpr int kQueryStages = kQk <= 128 ? 2 : 1;
};

/// Position `count` in a ring of `stages`, and the parity of its turn.
template <int stages>
struct RingPosition {
  int stage;
  std::uint32_t parity;
  __device__ explicit RingPosition(std::uint32_t count)
      : stage(count % stages), parity(count / stages & 1) {}
};
using KeyPosition = RingPosition<kStages>;

/// Copy engine's view of each operand.
struct TensorMaps {
  CUtensorMap q, k, k_pe, v, k_cache, v_cache;
};

/// Query rows counted from the tile's first.
__host__ __device__ inline SequenceExtent extent_of(const QueryTile& tile) {
  return {.num_queries = tile.num_rows,
          .num_keys = tile.num_keys,
          .first_query = tile.position,
          .first_key = tile.first_key};
}

/// Keys [begin, end) of a request.
struct Keys {
  std::int32_t begin, end;
  __host__ __device__ Keys(std::int32_t begin, std::int32_t end) : begin(begin), end(end) {}
  __host__ __device__ explicit Keys(const KeyInterval& keys)
      : begin(static_cast<std::int32_t>(keys.begin)), end(static_cast<std::int32_t>(keys.end)) {}
  __host__ __device__ bool contains(const Keys& other) const {
    return begin <= other.begin && other.end <= end;
  }
};

/// The key tiles that a query tile reads: those of the blocks, then those of the rows. Each of the
/// two has its own grid of tiles, from key 0 and from key num_paged on.
template <int kKeys>
struct KeyWalk {
  std::int32_t num_paged;
  std::int32_t paged_begin, paged_count;  ///< Tiles.
  std::int32_t rows_begin, rows_count;

  __host__ __device__ KeyWalk(const Keys& any, std::int32_t num_paged) : num_paged(num_paged) {
    const std::int32_t paged_end = any.end < num_paged ? any.end : num_paged;
    paged_begin = any.begin / kKeys;
    paged_count = any.begin < paged_end ? (paged_end + kKeys - 1) / kKeys - paged_begin : 0;
    const std::int32_t first = any.begin > num_paged ? any.begin - num_paged : 0;
    rows_begin = first / kKeys;
    rows_count = num_paged + first < any.end
                     ? (any.end - num_paged + kKeys - 1) / kKeys - rows_begin
                     : 0;
  }
  __host__ __device__ std::int32_t count() const { return paged_count + rows_count; }
  __host__ __device__ bool is_paged(std::int32_t i) const { return i < paged_count; }
  /// The first key of tile `i`.
  __host__ __device__ std::int32_t first_key(std::int32_t i) const {
    return is_paged(i) ? (paged_begin + i) * kKeys
                       : num_paged + (rows_begin + i - paged_count) * kKeys;
  }
  /// No key of tile `i` is at or behind it.
  __host__ __device__ std::int32_t limit(std::int32_t i) const {
    return is_paged(i) ? num_paged : INT32_MAX;
  }
  /// Whether tile `i` is full and lies in `keys`.
  __host__ __device__ bool is_inside(std::int32_t i, const Keys& keys) const {
    const std::int32_t first = first_key(i);
    return keys.contains({first, first + kKeys}) && first + kKeys <= limit(i);
  }
};

/// What a block does at a time: a query tile of one head.
struct Item {
  QueryTile tile;
  std::int32_t head;  ///< Negative: there is no item any more.
  Keys any;           ///< Some row of the tile sees them.
  Keys common;        ///< Every row does.
};

/// Heads that run at once share L2 with what they read: all tiles of `heads_at_once` heads come
/// before those of the next.
__device__ __forceinline__ Item item_at(const PrefillParams& op, std::int32_t index) {
  const std::int32_t in_turn = op.heads_at_once * op.num_tiles;
  const std::int32_t turn = index / in_turn;
  const std::int32_t rest = index - turn * in_turn;
  const std::int32_t tile = rest / op.heads_at_once;
  const int4* words = reinterpret_cast<const int4*>(op.tiles + tile);
  const int4 a = __ldg(words), b = __ldg(words + 1);
  const QueryTile t{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  return {t, turn * op.heads_at_once + rest - tile * op.heads_at_once,
          Keys(visible_to_any(op.variant, {0, t.num_rows}, extent_of(t))),
          Keys(visible_to_all(op.variant, {0, t.num_rows}, extent_of(t)))};
}

/// Shared memory of one block. Operand tiles come first: they are 1024-byte aligned. Chunks are
/// [rows][64 channels] in the 128-byte swizzle.
template <typename W>
struct SharedMemory {
  std::uint8_t q[W::kQueryStages][W::kQkChunks][kQueryTile * 128];
  std::uint8_t k[kStages][W::kQkChunks][W::kKeys * 128];
  std::uint8_t v[kStages][W::kVChunks][W::kKeys * 128];
  std::uint64_t q_full[W::kQueryStages], q_empty[W::kQueryStages];
  std::uint64_t k_full[kStages], k_empty[kStages];
  std::uint64_t v_full[kStages], v_ready[kStages], v_empty[kStages];
  bool not_finite[kStages];  ///< Comes with v_ready: values need repair.
  alignas(16) std::uint8_t items[W::kQueryStages][sizeof(Item)];  ///< An Item comes with its q.

  __device__ Item& item(int stage) { return *reinterpret_cast<Item*>(items[stage]); }

  /// Run by one thread.
  __device__ void init() {
    constexpr int kWarps = kComputeThreads / 32;
    const auto init = [](std::uint64_t& full, std::uint64_t& empty, int users) {
      ptx::mbarrier_init(ptx::shared_address(&full), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty), users);
    };
    for (int i = 0; i < W::kQueryStages; ++i) {
      init(q_full[i], q_empty[i], kComputeThreads + kInspectThreads);
    }
    for (int i = 0; i < kStages; ++i) {
      init(k_full[i], k_empty[i], kWarps);
      init(v_full[i], v_empty[i], kWarps);
      ptx::mbarrier_init(ptx::shared_address(&v_ready[i]), kInspectThreads);
      not_finite[i] = false;
    }
    ptx::mbarrier_init_fence();
  }
};

}  // namespace fovea::cuda::prefill
