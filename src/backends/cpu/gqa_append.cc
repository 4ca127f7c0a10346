#include <algorithm>

#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rotation.h"
#include "backends/cpu/rows.h"
#include "ops/index_view.h"

namespace fovea::cpu {
namespace {

/// Keys of one token, turned in their own dtype before they are stored: a cache of another dtype
/// rounds what the op rope would have left, and nothing else.
class KeyWriter {
 public:
  /// Rotated channels that fit the buffer on the stack; no model has more than 256.
  static constexpr std::int64_t kMaxBufferedRope = 1024;

  KeyWriter(const Kernels& kernels, const GqaAppendParams& params)
      : kernels_(kernels), params_(params) {
    if (params.rope.cos_sin) rope_dim_ = params.rope.cos_sin.shape[1];
  }

  void write(std::int64_t t, const Row& stored) const {
    const std::int64_t heads = params_.k.shape[1], width = params_.k.shape[2];
    if (rope_dim_ == 0) {
      for (std::int64_t h = 0; h < heads; ++h) {
        copy_row(kernels_, row_of(params_.k, {t, h}), width, stored.from(h * width));
      }
      return;
    }
    const TokenAngles angles(params_.rope, t);
    for (std::int64_t h = 0; h < heads; ++h) {
      const Row key = row_of(params_.k, {t, h});
      const Row to = stored.from(h * width);
      if (to.dtype == key.dtype) {
        copy_row(kernels_, key, width, to);
        angles.rotate(kernels_, to);
      } else {
        write_converted(angles, key, to);
      }
    }
  }

 private:
  void write_converted(const TokenAngles& angles, const Row& key, const Row& to) const {
    alignas(64) std::byte buffer[kMaxBufferedRope * sizeof(float)];
    const Row turned{buffer, key.dtype, 1};
    copy_row(kernels_, key, rope_dim_, turned);
    angles.rotate(kernels_, turned);
    copy_row(kernels_, turned, rope_dim_, to);
    copy_row(kernels_, key.from(rope_dim_), params_.k.shape[2] - rope_dim_, to.from(rope_dim_));
  }
  const Kernels& kernels_;
  const GqaAppendParams& params_;
  std::int64_t rope_dim_ = 0;
};

}  // namespace

const char* gqa_append_declines(const GqaAppendParams& params) {
  const bool converts = params.rope.cos_sin && params.k_cache->format().dtype != params.k.dtype;
  return converts && params.rope.cos_sin.shape[1] > KeyWriter::kMaxBufferedRope
             ? "turns at most 1024 channels on the way into a cache of another dtype"
             : nullptr;
}

void gqa_append(const Kernels& kernels, const OpContext& ctx, const GqaAppendParams& params) {
  const KeyWriter keys(kernels, params);
  const std::int64_t heads = params.v.shape[1], width = params.v.shape[2];
  const auto append_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t slot = index_at(params.slot_mapping, t);
      if (slot < 0) continue;
      keys.write(t, {params.k_cache->slot(slot), params.k_cache->format().dtype, 1});
      const Row stored{params.v_cache->slot(slot), params.v_cache->format().dtype, 1};
      for (std::int64_t h = 0; h < heads; ++h) {
        copy_row(kernels, row_of(params.v, {t, h}), width, stored.from(h * width));
      }
    }
  };
  for_row_ranges(*ctx.pool, params.k.shape[0], heads * (params.k.shape[2] + width), append_tokens);
}

}  // namespace fovea::cpu
