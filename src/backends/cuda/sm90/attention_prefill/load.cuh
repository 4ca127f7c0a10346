// The loading warp: query, key and value tiles through the copy engine.
#pragma once

#include "backends/cuda/sm90/attention_prefill/block.cuh"

namespace fovea::cuda::prefill {

/// The loading warp at work on one item.
template <typename W>
struct Loader {
  const PrefillParams& op;
  const TensorMaps& maps;
  SharedMemory<W>& s;
  const int lane;
  const std::uint64_t policy;
  const std::int32_t nope_chunks;  ///< Chunks of k; those behind are k_pe's.

  __device__ Loader(const PrefillParams& op, const TensorMaps& maps, SharedMemory<W>& s)
      : op(op),
        maps(maps),
        s(s),
        lane(threadIdx.x % 32),
        policy(ptx::make_l2_policy(ptx::L2Policy::evict_normal)),
        nope_chunks(op.pe_dim > 0 ? (op.qk_dim - op.pe_dim + 63) / 64 : W::kQkChunks) {}

  /// The item and its queries, when a stage of them is free. Where k_pe has chunks of its own the
  /// queries' are cut alike; channels past the last one come out as zeros.
  __device__ void load_queries(const Item& item, bool has_keys, std::uint32_t turn) {
    const RingPosition<W::kQueryStages> at(turn);
    const std::uint32_t full = ptx::shared_address(&s.q_full[at.stage]);
    ptx::mbarrier_wait(ptx::shared_address(&s.q_empty[at.stage]), at.parity ^ 1);
    if (lane == 0) {
      s.item(at.stage) = item;
      ptx::mbarrier_arrive_expect(full, has_keys ? W::kQueryBytes : 0);
    }
    __syncwarp();
    if (has_keys && lane < W::kQkChunks) {
      const int x = lane < nope_chunks ? lane * 64
                                       : op.qk_dim - op.pe_dim + (lane - nope_chunks) * 64;
      ptx::load_box(ptx::shared_address(s.q[at.stage][lane]), &maps.q, x, item.head,
                    item.tile.query_row, 0, full, policy);
    }
  }

  /// Waits for a stage of keys or values and announces what comes.
  __device__ void open_stage(std::uint64_t& full, std::uint64_t& empty, std::uint32_t parity,
                             std::uint32_t bytes) {
    ptx::mbarrier_wait(ptx::shared_address(&empty), parity ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect(ptx::shared_address(&full), bytes);
    __syncwarp();
  }

  /// Key or value tile from row `row` of k and k_pe or of v on.
  template <int kChunks>
  __device__ void load_rows(std::uint8_t (&to)[kChunks][W::kKeys * 128], const CUtensorMap* rows,
                            int chunks_of_rows, std::int32_t row, std::int32_t head,
                            std::uint64_t& full) {
    if (lane >= kChunks) return;
    const bool is_pe = lane >= chunks_of_rows;
    const CUtensorMap* map = is_pe ? &maps.k_pe : rows;
    const int x = (is_pe ? lane - chunks_of_rows : lane) * 64;
    ptx::load_box(ptx::shared_address(to[lane]), map, x, is_pe ? 0 : head, row, 0,
                  ptx::shared_address(&full), policy);
  }

  /// The boxes of a tile that hold keys which some query sees; others' blocks may be anyone's.
  struct Boxes {
    static constexpr int kOfLane = W::kKeys / 32;
    std::int32_t rows;         ///< Keys of a box.
    std::int32_t begin, end;   ///< Boxes of the tile.
    std::int32_t block[kOfLane];  ///< Of boxes lane, lane + 32, ...
    std::int32_t row[kOfLane];    ///< The box's first, in its block.
  };

  __device__ Boxes find_boxes(const QueryTile& tile, const Keys& any, std::int32_t first_key) {
    Boxes boxes;
    boxes.rows = box_rows();
    const std::int32_t keys_end = min(min(any.end, tile.num_paged), first_key + W::kKeys);
    boxes.begin = (max(any.begin, first_key) - first_key) / boxes.rows;
    boxes.end = (keys_end - first_key + boxes.rows - 1) / boxes.rows;
    const std::int32_t* blocks = op.block_table + tile.request * op.block_table_stride;
    const auto block_size = static_cast<std::uint32_t>(op.k_cache.block_size);
#pragma unroll
    for (int i = 0; i < Boxes::kOfLane; ++i) {
      const int box = lane + 32 * i;
      const std::uint32_t key = first_key + box * boxes.rows;
      const bool needed = box >= boxes.begin && box < boxes.end;
      boxes.block[i] = needed ? __ldg(blocks + key / block_size) : 0;
      boxes.row[i] = key % block_size;
    }
    return boxes;
  }

  template <int kChunks>
  __device__ void load_boxes(std::uint8_t (&to)[kChunks][W::kKeys * 128], const CUtensorMap* map,
                             const Boxes& boxes, std::int32_t head, std::uint64_t& full) {
#pragma unroll
    for (int i = 0; i < Boxes::kOfLane; ++i) {
      const int box = lane + 32 * i;
      if (box < boxes.begin || box >= boxes.end) continue;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        ptx::load_box(ptx::shared_address(to[chunk]) + box * boxes.rows * 128, map, chunk * 64,
                      head, boxes.row[i], boxes.block[i], ptx::shared_address(&full), policy);
      }
    }
  }

  /// Keys that one copy from blocks brings: they must lie in one block.
  __device__ std::int32_t box_rows() const {
    const auto size = static_cast<std::uint32_t>(op.k_cache.block_size);
    return min(size & (0u - size), static_cast<std::uint32_t>(W::kKeys));
  }
};

/// Run by one warp.
template <typename W>
__device__ void load_items(const PrefillParams& op, const TensorMaps& maps, SharedMemory<W>& s) {
  Loader<W> loader(op, maps, s);
  const std::int32_t num_items = op.num_tiles * op.num_heads;
  const std::int32_t group = op.num_heads / op.num_kv_heads;
  constexpr int kRowBytes = W::kKeys * 128;
  std::uint32_t count = 0, turn = 0;
  for (std::int32_t i = blockIdx.x; i < num_items; ++turn) {
    // Every item is asked for once: the counter comes back to 0.
    std::int32_t next = 0;
    if (loader.lane == 0) next = gridDim.x + atomicInc(op.counter, num_items - 1);
    const Item item = item_at(op, i);
    const QueryTile& tile = item.tile;
    const std::int32_t kv_head = item.head / group;
    const KeyWalk<W::kKeys> walk(item.any, tile.num_paged);
    if (walk.count() == 0) loader.load_queries(item, false, turn);
    for (std::int32_t t = 0; t < walk.count(); ++t, ++count) {
      const KeyPosition at(count);
      const std::int32_t first_key = walk.first_key(t);
      const bool paged = walk.is_paged(t);
      const std::int32_t row = tile.first_row + first_key - tile.num_paged;
      typename Loader<W>::Boxes boxes;
      if (paged) boxes = loader.find_boxes(tile, item.any, first_key);
      const std::uint32_t bytes = paged ? (boxes.end - boxes.begin) * boxes.rows * 128 : kRowBytes;
      std::uint64_t &k_full = s.k_full[at.stage], &v_full = s.v_full[at.stage];
      loader.open_stage(k_full, s.k_empty[at.stage], at.parity, bytes * W::kQkChunks);
      if (paged) {
        loader.load_boxes(s.k[at.stage], &maps.k_cache, boxes, kv_head, k_full);
      } else {
        loader.load_rows(s.k[at.stage], &maps.k, loader.nope_chunks, row, kv_head, k_full);
      }
      // The first keys may come while no stage of queries is free yet.
      if (t == 0) loader.load_queries(item, true, turn);
      loader.open_stage(v_full, s.v_empty[at.stage], at.parity, bytes * W::kVChunks);
      if (paged) {
        loader.load_boxes(s.v[at.stage], &maps.v_cache, boxes, kv_head, v_full);
      } else {
        loader.load_rows(s.v[at.stage], &maps.v, W::kVChunks, row, kv_head, v_full);
      }
    }
    i = __shfl_sync(~0u, next, 0);
  }
  loader.load_queries({{}, -1, {0, 0}, {0, 0}}, false, turn);
}

}  // namespace fovea::cuda::prefill
