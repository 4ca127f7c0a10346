// Rows into a cache and out of it.
#include <algorithm>

#include "backends/cuda/index_checks.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/plain/block.cuh"
#include "backends/cuda/plain/kernels.h"
#include "backends/cuda/plain/rotation.cuh"
#include "quant/power_of_two.h"

namespace fovea::cuda::plain {
namespace {

/// group_scale of values [begin, end), in every thread.
template <class Code, class Values>
__device__ float scale_of_group(const Values& values, std::int64_t begin, std::int64_t end) {
  float amax = 0;
  unsigned long long first_nan = ~0ull;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float value = values(i);
    if (isfinite(value)) amax = fmaxf(amax, fabsf(value));
    if (isnan(value)) first_nan = min(first_nan, static_cast<unsigned long long>(i));
  }
  amax = reduce_block(amax, [](float a, float b) { return fmaxf(a, b); });
  first_nan = reduce_block(
      first_nan, [](unsigned long long a, unsigned long long b) { return min(a, b); });
  if (!Code::kHasNan && first_nan != ~0ull) return values(static_cast<std::int64_t>(first_nan));
  return fmaxf(amax / Code::kLargest, std::numeric_limits<float>::min());
}

/// quantize_group of values [begin, end); codes of four bits begin at even ones.
template <class Code, class Values>
__device__ void encode_group(const Values& values, std::int64_t begin, std::int64_t end,
                             float scale, std::byte* head) {
  auto* codes = reinterpret_cast<std::uint8_t*>(head);
  constexpr int kStep = Code::kPacked ? 2 : 1;
  for (std::int64_t i = begin + kStep * threadIdx.x; i < end; i += kStep * kThreads) {
    std::uint8_t code = Code::encode(values(i) / scale);
    if (Code::kPacked && i + 1 < end) code |= Code::encode(values(i + 1) / scale) << 4;
    codes[i / kStep] = code;
  }
}

__device__ inline void store_unaligned(std::byte* to, float value) {
  memcpy(to, &value, sizeof value);
}

template <class Code, class Values>
__device__ void encode_scaled(const HeadFormat& format, const Values& values, std::byte* head) {
  switch (format.scales) {
    case KvScales::per_tensor:
      encode_group<Code>(values, 0, format.elements, format.scale, head);
      break;
    case KvScales::per_token:
      for (int group = 0; group < 2; ++group) {
        const std::int64_t begin = group == 0 ? 0 : format.first_group;
        const std::int64_t end = group == 0 ? format.first_group : format.elements;
        const float scale = scale_of_group<Code>(values, begin, end);
        encode_group<Code>(values, begin, end, scale, head);
        if (threadIdx.x == 0) store_unaligned(head + format.code_bytes + group * 4, scale);
      }
      break;
    default: {
      using namespace kv_fp8_ds_mla;
      for (std::int64_t begin = 0; begin < kLatent; begin += kGroup) {
        float scale = scale_of_group<Code>(values, begin, begin + kGroup);
        if (format.power_of_two_scales) scale = power_of_two_above(scale);
        encode_group<Code>(values, begin, begin + kGroup, scale, head);
        if (threadIdx.x == 0) store_unaligned(head + kScalesAt + begin / kGroup * 4, scale);
      }
      for (std::int64_t i = threadIdx.x; i < kRope; i += kThreads) {
        store(head + kRopeAt, DType::bf16, i, values(kLatent + i));
      }
    }
  }
}

/// encode_row of one head by a block: values(i) is its element i.
template <class Values>
__device__ void encode_head(const HeadFormat& format, const Values& values, std::byte* head) {
  switch (format.dtype) {
    case DType::i4:
      return encode_scaled<IntegerCode<4>>(format, values, head);
    case DType::i8:
      return encode_scaled<IntegerCode<8>>(format, values, head);
    case DType::f8e5m2:
      return encode_scaled<FloatCode<Float8E5M2>>(format, values, head);
    case DType::f8e4m3fn:
      return encode_scaled<FloatCode<Float8E4M3FN>>(format, values, head);
    default:
      for (std::int64_t i = threadIdx.x; i < format.elements; i += kThreads) {
        store(head, format.dtype, i, values(i));
      }
  }
}

__device__ bool is_slot(DeviceFault* fault, std::int64_t t, std::int64_t slot,
                        std::int64_t num_slots) {
  return is_in_range(fault, DeviceFault::Argument::slot_mapping, t, slot, -1, num_slots);
}

/// A block per token.
__global__ void kv_append_kernel(TensorView kv_c, TensorView k_pe, TensorView norm_weight,
                                 float norm_eps, RopeAngles rope, TensorView slot_mapping,
                                 CacheRows cache, std::int64_t num_slots, DeviceFault* fault) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t slot = load_index(slot_mapping, at(slot_mapping, t));
  if (slot == -1 || !is_slot(fault, t, slot, num_slots)) return;
  if (!has_positions(fault, rope, t)) return;
  const std::int64_t latent = kv_c.shape[1];
  const auto latent_channel = [&](std::int64_t i) {
    return load(kv_c.data, kv_c.dtype, at(kv_c, t, i));
  };
  const auto rope_channel = [&](std::int64_t i) {
    return load(k_pe.data, k_pe.dtype, at(k_pe, t, i));
  };
  const double scale = norm_weight.data ? rms_norm_scale(latent, norm_eps, latent_channel) : 1;
  const auto value = [&](std::int64_t i) {
    if (i >= latent) return turned_channel(rope, t, i - latent, k_pe.dtype, rope_channel);
    if (!norm_weight.data) return latent_channel(i);
    const double weight = load(norm_weight.data, norm_weight.dtype, at(norm_weight, i));
    return rounded(kv_c.dtype, latent_channel(i) * scale * weight);
  };
  encode_head(cache.head, value, cache.slot(slot));
}

/// A block per token and head.
__global__ void gqa_append_kernel(TensorView heads, TensorView slot_mapping, RopeAngles rope,
                                  CacheRows cache, std::int64_t num_slots, DeviceFault* fault) {
  const std::int64_t t = blockIdx.x / heads.shape[1];
  const std::int64_t n = blockIdx.x % heads.shape[1];
  const std::int64_t slot = load_index(slot_mapping, at(slot_mapping, t));
  if (slot == -1 || !is_slot(fault, t, slot, num_slots)) return;
  if (!has_positions(fault, rope, t)) return;
  const auto stored = [&](std::int64_t i) {
    return load(heads.data, heads.dtype, at(heads, t, n, i));
  };
  const auto value = [&](std::int64_t i) {
    return turned_channel(rope, t, i, heads.dtype, stored);
  };
  encode_head(cache.head, value, cache.slot(slot) + n * cache.head.bytes);
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

/// A block per piece.
__global__ void kv_gather_kernel(const __grid_constant__ Pieces pieces, CacheRows cache,
                                 TensorView out) {
  const Piece piece = pieces.of[blockIdx.x];
  const std::int64_t width = out.shape[1];
  for (std::int64_t j = threadIdx.x; j < piece.count * width; j += kThreads) {
    const std::int64_t d = j % width;
    const std::byte* row = cache.row(piece.block, piece.row + j / width);
    const std::int64_t to = at(out, piece.out_row + j / width, d);
    if (out.dtype == DType::u8) {
      static_cast<std::byte*>(out.data)[to] = row[d];
    } else if (cache.head.scales == KvScales::none) {
      copy_element(row, cache.head.dtype, d, out.data, out.dtype, to);
    } else {
      const std::byte* head = row + d / cache.head.elements * cache.head.bytes;
      store(out.data, out.dtype, to, decode_element(cache.head, head, d % cache.head.elements));
    }
  }
}

}  // namespace

void kv_append(const OpContext& ctx, const KvAppendParams& p) {
  launch(ctx, p.kv_c.shape[0], kv_append_kernel, p.kv_c, p.k_pe, p.norm_weight, p.norm_eps,
         p.rope, p.slot_mapping,
         CacheRows(*p.cache, 1), p.cache->num_slots(), ctx.device_fault);
}

void gqa_append(const OpContext& ctx, const GqaAppendParams& p) {
  const std::int64_t heads = p.k.shape[1];
  launch(ctx, p.k.shape[0] * heads, gqa_append_kernel, p.k, p.slot_mapping, p.rope,
         CacheRows(*p.k_cache, heads), p.k_cache->num_slots(), ctx.device_fault);
  launch(ctx, p.v.shape[0] * heads, gqa_append_kernel, p.v, p.slot_mapping, RopeAngles{},
         CacheRows(*p.v_cache, heads), p.v_cache->num_slots(), ctx.device_fault);
}

void kv_gather(const OpContext& ctx, const KvGatherParams& p) {
  const CacheRows cache(*p.cache, p.cache->format().num_heads);
  const std::int64_t block_size = p.cache->block_size();
  Pieces pieces;
  const auto send = [&] {
    launch(ctx, pieces.count, kv_gather_kernel, pieces, cache, p.out);
    pieces.count = 0;
  };
  std::int64_t out_row = 0;
  for (std::size_t r = 0; r < p.seq_lens.size(); ++r) {
    const std::int32_t* blocks =
        p.block_table.data + static_cast<std::int64_t>(r) * p.block_table.stride;
    const std::int64_t end = std::int64_t{p.starts[r]} + p.seq_lens[r];
    for (std::int64_t key = p.starts[r]; key < end;) {
      const std::int64_t row = key % block_size;
      // Long blocks in several pieces, so that many threads share them.
      constexpr std::int64_t kRows = 64;
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
