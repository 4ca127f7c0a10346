#include <algorithm>

#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rotation.h"
#include "backends/cpu/rows.h"
#include "ops/index_view.h"

namespace fovea::cpu {
namespace {

/// Heads of one token into its slot. Keys turn in their own dtype before they are stored: a cache
/// of another format holds what the op rope would have left, and nothing else.
class HeadWriter {
 public:
  HeadWriter(const Kernels& kernels, const TensorView& heads, const PagedKvCache& cache,
             const RopeAngles* rope)
      : kernels_(kernels),
        heads_(heads),
        cache_(cache),
        stored_(kernels, cache.format(), heads.shape[1]),
        rope_(rope) {}

  void write(std::int64_t t, std::int64_t slot) const {
    for (std::int64_t h = 0; h < heads_.shape[1]; ++h) {
      const Row head = row_of(heads_, {t, h});
      if (cache_.format().scales == KvScales::none) {
        const Row stored{cache_.slot(slot), cache_.format().dtype, 1};
        write_plain(t, head, stored.from(h * heads_.shape[2]));
      } else {
        encode(t, head, cache_.slot(slot), h);
      }
    }
  }

 private:
  void write_plain(std::int64_t t, const Row& head, const Row& stored) const {
    copy_row(kernels_, head, heads_.shape[2], stored);
    if (!rope_) return;
    if (stored.dtype == head.dtype) {
      TokenAngles(*rope_, t).rotate(kernels_, stored);
    } else {
      alignas(64) std::byte buffer[KvFormat::kMaxScaledHead * sizeof(float)];
      const std::int64_t rope_dim = rope_->cos_sin.shape[1];
      copy_row(kernels_, turned(t, head, rope_dim, buffer), rope_dim, stored);
    }
  }

  void encode(std::int64_t t, const Row& head, std::byte* row, std::int64_t h) const {
    alignas(64) std::byte buffer[KvFormat::kMaxScaledHead * sizeof(float)];
    alignas(64) float values[KvFormat::kMaxScaledHead + kMaxLanes];
    const std::int64_t width = heads_.shape[2];
    load_row(kernels_, turned(t, head, width, buffer), width, values);
    stored_.store(values, row, h);
  }

  /// The first `count` channels of `head` in its dtype, turned; `buffer` holds them.
  Row turned(std::int64_t t, const Row& head, std::int64_t count, std::byte* buffer) const {
    const Row row{buffer, head.dtype, 1};
    copy_row(kernels_, head, count, row);
    if (rope_) TokenAngles(*rope_, t).rotate(kernels_, row);
    return row;
  }

  const Kernels& kernels_;
  const TensorView& heads_;  ///< [T, Hk, D]
  const PagedKvCache& cache_;
  StoredHeads stored_;
  const RopeAngles* rope_;  ///< Null: nothing turns.
};

}  // namespace

const char* gqa_append_declines(const GqaAppendParams& params) {
  const bool converts = params.rope.cos_sin && params.k_cache->format().dtype != params.k.dtype;
  return converts && params.rope.cos_sin.shape[1] > KvFormat::kMaxScaledHead
             ? "turns at most 2048 channels on the way into a cache of another dtype"
             : nullptr;
}

void gqa_append(const Kernels& kernels, const OpContext& ctx, const GqaAppendParams& params) {
  const HeadWriter keys(kernels, params.k, *params.k_cache,
                        params.rope.cos_sin ? &params.rope : nullptr);
  const HeadWriter values(kernels, params.v, *params.v_cache, nullptr);
  const auto append_tokens = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t slot = index_at(params.slot_mapping, t);
      if (slot < 0) continue;
      keys.write(t, slot);
      values.write(t, slot);
    }
  };
  const std::int64_t row = params.k.shape[1] * (params.k.shape[2] + params.v.shape[2]);
  for_row_ranges(*ctx.pool, params.k.shape[0], row, append_tokens);
}

}  // namespace fovea::cpu
