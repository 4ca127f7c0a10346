// Rows into a cache and out of it.
#include <algorithm>

#include "backends/cuda/index_checks.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/plain/encode.cuh"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/plain/rotation.cuh"
#include "backends/cuda/plain/rows.cuh"
#include "core/divisor.h"

namespace fovea::cuda::plain {
namespace {

__device__ bool is_slot(DeviceFault* fault, std::int64_t t, std::int64_t slot,
                        std::int64_t num_slots) {
  return is_in_range(fault, DeviceFault::Argument::slot_mapping, t, slot, -1, num_slots);
}

/// The first channels of a row, in shared memory of the threads that store it: a write to the cache
/// would hold up the reads behind it, and scales need every channel twice. Rows of most models have
/// no more than `capacity`; what is behind is read again.
template <class Threads>
struct StagedRow {
  float* at;
  std::int64_t capacity;

  /// channel(i) for i in [begin, end).
  template <class Channel>
  __device__ void fill(std::int64_t begin, std::int64_t end, const Channel& channel) const {
    end = min(end, capacity);
#pragma unroll 4
    for (std::int64_t i = begin + Threads::rank(); i < end; i += Threads::kSize) {
      at[i] = channel(i);
    }
  }
  /// A head from channel `first` on that turns: channel(i) is its i-th before.
  template <class Channel>
  __device__ void fill_turned(const RopeAngles& angles, std::int64_t token, DType dtype,
                              std::int64_t first, const Channel& channel) const {
    for (std::int64_t pair = Threads::rank(); pair < num_pairs(angles); pair += Threads::kSize) {
      const TurnedPair turned = turn_pair(angles, token, pair, dtype, channel);
      put(first + turned.first, turned.first_value);
      put(first + turned.second, turned.second_value);
    }
  }

 private:
  __device__ void put(std::int64_t i, float value) const {
    if (i < capacity) at[i] = value;
  }
};

/// A block per token.
__global__ void kv_append_kernel(const __grid_constant__ KvAppendParams p,
                                 const __grid_constant__ CacheRows cache, std::int64_t num_slots,
                                 DeviceFault* fault) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t slot = load_index(p.slot_mapping, at(p.slot_mapping, t));
  if (slot == -1 || !is_slot(fault, t, slot, num_slots)) return;
  if (!has_positions(fault, p.rope, t)) return;
  const std::int64_t latent = p.kv_c.shape[1];
  const bool norms = p.norm_weight.data != nullptr;
  const double scale = norms ? rms_norm_scale(ElementRow(p.kv_c, at(p.kv_c, t)), p.norm_eps) : 1;
  const auto latent_channel = [&](std::int64_t i) {
    const float x = load(p.kv_c.data, p.kv_c.dtype, at(p.kv_c, t, i));
    if (!norms) return x;
    const float weight = load(p.norm_weight.data, p.norm_weight.dtype, at(p.norm_weight, i));
    return rounded(p.kv_c.dtype, normed(x, scale, weight));
  };
  const auto rope_channel = [&](std::int64_t i) {
    return load(p.k_pe.data, p.k_pe.dtype, at(p.k_pe, t, i));
  };
  constexpr int kStaged = 1024;
  __shared__ float memory[kStaged];
  const StagedRow<Block> staged{memory, kStaged};
  staged.fill(0, latent, latent_channel);
  staged.fill_turned(p.rope, t, p.k_pe.dtype, latent, rope_channel);
  staged.fill(latent + 2 * num_pairs(p.rope), latent + p.k_pe.shape[1],
              [&](std::int64_t i) { return rope_channel(i - latent); });
  Block::sync();
  const auto channel = [&](std::int64_t i) {
    if (i < kStaged) return memory[i];
    if (i < latent) return latent_channel(i);
    return turned_channel(p.rope, t, i - latent, p.k_pe.dtype, rope_channel);
  };
  encode_head<Block>(cache.head, channel, cache.slot(slot));
}

/// A warp per token, head, and keys or values.
__global__ void gqa_append_kernel(const __grid_constant__ GqaAppendParams p,
                                  const __grid_constant__ CacheRows k_cache,
                                  const __grid_constant__ CacheRows v_cache, Divisor heads,
                                  std::int64_t num_slots, DeviceFault* fault) {
  const std::int64_t tokens = p.k.shape[0];
  const std::uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32;
  const std::int64_t row = heads.quotient(i), n = heads.remainder(i);
  const bool is_key = row < tokens;
  const std::int64_t t = is_key ? row : row - tokens;
  if (t >= tokens) return;
  const std::int64_t slot = load_index(p.slot_mapping, at(p.slot_mapping, t));
  if (slot == -1 || !is_slot(fault, t, slot, num_slots)) return;
  if (is_key && !has_positions(fault, p.rope, t)) return;
  const TensorView& x = is_key ? p.k : p.v;
  const auto stored = [&](std::int64_t c) { return load(x.data, x.dtype, at(x, t, n, c)); };
  constexpr int kStaged = 256;
  __shared__ float of_warp[kWarps][kStaged];
  float* memory = of_warp[threadIdx.x / 32];
  const StagedRow<Warp> staged{memory, kStaged};
  if (is_key) staged.fill_turned(p.rope, t, x.dtype, 0, stored);
  staged.fill(is_key ? 2 * num_pairs(p.rope) : 0, x.shape[2], stored);
  Warp::sync();
  const auto channel = [&](std::int64_t c) {
    if (c < kStaged) return memory[c];
    return is_key ? turned_channel(p.rope, t, c, x.dtype, stored) : stored(c);
  };
  const CacheRows& cache = is_key ? k_cache : v_cache;
  encode_head<Warp>(cache.head, channel, cache.slot(slot) + n * cache.head.bytes);
}

/// Rows [row, row + count) of a block.
struct Piece {
  std::int32_t block;
  std::int32_t row;
  std::int32_t count;
  std::int32_t out_row;
};

/// What fits a kernel's parameters beside the rest.
struct Pieces {
  static constexpr int kMax = 240;
  int count = 0;
  Piece of[kMax];
};

/// `bytes` bytes by a warp.
__device__ void copy_bytes(const std::byte* from, std::byte* to, std::int64_t bytes) {
  const int lane = Warp::rank();
  const std::int64_t addresses = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(from) |
                                                           reinterpret_cast<std::uintptr_t>(to));
  constexpr std::int64_t kVector = sizeof(uint4);
  if ((addresses | bytes) % kVector != 0) {
    for (std::int64_t i = lane; i < bytes; i += Warp::kSize) to[i] = from[i];
    return;
  }
  for (std::int64_t i = lane; i < bytes / kVector; i += Warp::kSize) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

/// The elements of a stored row by a warp.
__device__ void decode_heads(const HeadFormat& format, const std::byte* row, const TensorView& out,
                             std::int64_t to) {
  for (std::int64_t first = 0; first < out.shape[1]; first += format.elements) {
    // Together: a write could hold up the next read.
    for (std::int64_t i = Warp::rank(); i < format.elements; i += kTogether * Warp::kSize) {
      float values[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        const std::int64_t element = i + j * Warp::kSize;
        if (element < format.elements) values[j] = decode_element(format, row, element);
      }
      for (int j = 0; j < kTogether; ++j) {
        const std::int64_t element = i + j * Warp::kSize;
        if (element < format.elements) store(out.data, out.dtype, to + first + element, values[j]);
      }
    }
    row += format.bytes;
  }
}

/// kBlocksPerPiece blocks per piece, a warp per row.
constexpr int kBlocksPerPiece = 16;
__global__ void kv_gather_kernel(const __grid_constant__ Pieces pieces,
                                 const __grid_constant__ CacheRows cache,
                                 const __grid_constant__ TensorView out) {
  const Piece& piece = pieces.of[blockIdx.x / kBlocksPerPiece];
  const int j = blockIdx.x % kBlocksPerPiece * kWarps + threadIdx.x / 32;
  if (j >= piece.count) return;
  const std::byte* row = cache.row(piece.block, piece.row + j);
  const std::int64_t to = at(out, piece.out_row + j);
  const bool is_copy = out.dtype == DType::u8 || (cache.head.scales == KvScales::none &&
                                                  cache.head.dtype == out.dtype);
  if (is_copy) {
    const std::int64_t size = out.dtype == DType::u8 ? 1 : out.dtype == DType::f32 ? 4 : 2;
    copy_bytes(row, static_cast<std::byte*>(out.data) + to * size, out.shape[1] * size);
  } else {
    decode_heads(cache.head, row, out, to);
  }
}

}  // namespace

void kv_append(const OpContext& ctx, const KvAppendParams& p) {
  launch(ctx, p.kv_c.shape[0], kv_append_kernel, p, CacheRows(*p.cache, 1),
         p.cache->num_slots(), ctx.device_fault);
}

void gqa_append(const OpContext& ctx, const GqaAppendParams& p) {
  const std::int64_t heads = p.k.shape[1];
  if (heads == 0) return;
  launch_warps(ctx, 2 * p.k.shape[0] * heads, gqa_append_kernel, p, CacheRows(*p.k_cache, heads),
               CacheRows(*p.v_cache, heads), Divisor(heads), p.k_cache->num_slots(),
               ctx.device_fault);
}

void kv_gather(const OpContext& ctx, const KvGatherParams& p) {
  const CacheRows cache(*p.cache, p.cache->format().num_heads);
  const std::int64_t block_size = p.cache->block_size();
  Pieces pieces;
  const auto send = [&] {
    launch(ctx, pieces.count * kBlocksPerPiece, kv_gather_kernel, pieces, cache, p.out);
    pieces.count = 0;
  };
  std::int64_t out_row = 0;
  for (std::size_t r = 0; r < p.seq_lens.size(); ++r) {
    const std::int32_t* blocks =
        p.block_table.data + static_cast<std::int64_t>(r) * p.block_table.stride;
    const std::int64_t end = std::int64_t{p.starts[r]} + p.seq_lens[r];
    for (std::int64_t key = p.starts[r]; key < end;) {
      const std::int64_t row = key % block_size;
      constexpr std::int64_t kRows = kBlocksPerPiece * kWarps;  // One a warp.
      const std::int64_t count = std::min({end - key, block_size - row, kRows});
      if (pieces.count == Pieces::kMax) send();
      pieces.of[pieces.count++] = {blocks[key / block_size], static_cast<std::int32_t>(row),
                                   static_cast<std::int32_t>(count),
                                   static_cast<std::int32_t>(out_row)};
      key += count;
      out_row += count;
    }
  }
  send();
}

}  // namespace fovea::cuda::plain
