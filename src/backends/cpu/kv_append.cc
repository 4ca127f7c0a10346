#include "backends/cpu/formats/stored_heads.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/partition.h"
#include "backends/cpu/rms_norm.h"
#include "backends/cpu/rotation.h"
#include "backends/cpu/rows.h"
#include "ops/index_view.h"

namespace fovea::cpu {
namespace {

bool changes_rows(const KvAppendParams& params) {
  return params.norm_weight || params.rope.cos_sin;
}

/// Rows of tokens into their slots. They are normed and turned in their own dtype before they are
/// stored: a cache of another format holds what those ops would have left, and nothing else.
class LatentWriter {
 public:
  LatentWriter(const Kernels& kernels, const KvAppendParams& params)
      : kernels_(kernels),
        params_(params),
        latent_(params.kv_c.shape[1]),
        rope_dim_(params.k_pe.shape[1]),
        heads_(kernels, params.cache->format(), 1) {}

  void write(std::int64_t t, std::int64_t slot) const {
    const PagedKvCache& cache = *params_.cache;
    const Row kv_c = row_of(params_.kv_c, {t}), k_pe = row_of(params_.k_pe, {t});
    const Row stored{cache.slot(slot), cache.format().dtype, 1};
    const bool is_plain = cache.format().scales == KvScales::none;
    if (!changes_rows(params_)) {
      return is_plain ? copy(kv_c, k_pe, stored) : encode(kv_c, k_pe, cache.slot(slot));
    }
    if (is_plain && stored.dtype == kv_c.dtype) return change(t, kv_c, k_pe, stored);
    alignas(64) std::byte buffer[KvFormat::kMaxScaledHead * sizeof(float)];
    const Row changed{buffer, kv_c.dtype, 1};
    change(t, kv_c, k_pe, changed);
    if (is_plain) {
      copy_row(kernels_, changed, latent_ + rope_dim_, stored);
    } else {
      encode(changed, changed.from(latent_), cache.slot(slot));
    }
  }

 private:
  void copy(const Row& kv_c, const Row& k_pe, const Row& to) const {
    copy_row(kernels_, kv_c, latent_, to);
    copy_row(kernels_, k_pe, rope_dim_, to.from(latent_));
  }

  void encode(const Row& kv_c, const Row& k_pe, std::byte* row) const {
    alignas(64) float values[KvFormat::kMaxScaledHead + kMaxLanes];
    load_row(kernels_, kv_c, latent_, values);
    load_row(kernels_, k_pe, rope_dim_, values + latent_);
    heads_.store(values, row, 0);
  }

  void change(std::int64_t t, const Row& kv_c, const Row& k_pe, const Row& to) const {
    copy(kv_c, k_pe, to);
    if (params_.norm_weight) {
      norm_row(kernels_, to, latent_, params_.norm_weight, params_.norm_eps, to);
    }
    if (params_.rope.cos_sin) TokenAngles(params_.rope, t).rotate(kernels_, to.from(latent_));
  }

  const Kernels& kernels_;
  const KvAppendParams& params_;
  std::int64_t latent_;
  std::int64_t rope_dim_;
  StoredHeads heads_;
};

}  // namespace

const char* kv_append_declines(const KvAppendParams& params) {
  const bool converts = changes_rows(params) && params.cache->format().dtype != params.kv_c.dtype;
  return converts && params.kv_c.shape[1] + params.k_pe.shape[1] > KvFormat::kMaxScaledHead
             ? "changes rows of at most 2048 channels on the way into a cache of another dtype"
             : nullptr;
}

void kv_append(const Kernels& kernels, const OpContext& ctx, const KvAppendParams& params) {
  const LatentWriter writer(kernels, params);
  const std::int64_t width = params.kv_c.shape[1] + params.k_pe.shape[1];
  for_row_ranges(*ctx.pool, params.kv_c.shape[0], width,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t t = begin; t < end; ++t) {
                     const std::int64_t slot = index_at(params.slot_mapping, t);
                     if (slot >= 0) writer.write(t, slot);
                   }
                 });
}

}  // namespace fovea::cpu
