#include "backends/cpu/formats/stored_pairs.h"

#include <cstring>

#include "backends/cpu/formats/codes.h"
#include "kv/formats/fp8_ds_mla/codec.h"
#include "kv/formats/per_token/codec.h"

namespace fovea::cpu {

ChannelGroups StoredPairs::groups(const KvFormat& format, std::int64_t channels) {
  ChannelGroups groups;
  const auto add = [&](std::int64_t end) {
    const std::int64_t begin = groups.count == 0 ? 0 : groups.end[groups.count - 1];
    if (end > begin && begin < channels) groups.end[groups.count++] = std::min(end, channels);
  };
  if (format.scales == KvScales::per_token) add(format.first_group);
  if (format.scales == KvScales::ds_mla) {
    using namespace kv_fp8_ds_mla;
    for (std::int64_t end = kGroup; end <= kLatent; end += kGroup) add(end);
  }
  add(channels);
  return groups;
}

bool StoredPairs::takes(const Kernels& kernels, const KvFormat& format, std::int64_t v_channels) {
  if (!kernels.pairs) return false;
  if (format.scales == KvScales::none) return format.dtype == DType::bf16;
  // An empty first group would leave its scale without a place.
  if (format.scales == KvScales::per_token && format.first_group % 2 != 0) return false;
  const ChannelGroups groups = StoredPairs::groups(format, v_channels);
  for (int g = 0; g + 1 < groups.count; ++g) {
    if (groups.end[g] % kernels.pairs->channels != 0) return false;
  }
  return true;
}

const std::byte* StoredPairs::load(const std::byte* row, std::int64_t head, std::byte* copy,
                                   float* scales) const {
  const std::byte* bytes = head_of(row, head);
  load_scales(bytes, scales);
  if (format_.scales == KvScales::none) return bytes;
  if (format_.scales == KvScales::ds_mla) {
    using namespace kv_fp8_ds_mla;
    widen(bytes, kLatent, copy);
    std::memcpy(copy + kLatent * sizeof(BFloat16), bytes + kRopeAt, kRope * sizeof(BFloat16));
  } else {
    widen(bytes, format_.head_elements(), copy);
  }
  return copy;
}

const std::byte* StoredPairs::load_int16(const std::byte* row, std::int64_t head, std::byte* copy,
                                         float* scales) const {
  const std::byte* bytes = head_of(row, head);
  load_scales(bytes, scales);
  kernels_.pairs->widen_to_int16(bytes, format_.head_elements(),
                                 reinterpret_cast<std::int16_t*>(copy));
  return copy;
}

void StoredPairs::load_scales(const std::byte* head, float* scales) const {
  switch (format_.scales) {
    case KvScales::none:
      scales[0] = 1.f;
      break;
    case KvScales::per_tensor:
      scales[0] = format_.scale;
      break;
    case KvScales::per_token: {
      int group = 0;
      if (format_.first_group > 0) scales[group++] = kv_per_token::load_scale(format_, head, 0);
      if (format_.first_group < format_.head_elements()) {
        scales[group] = kv_per_token::load_scale(format_, head, 1);
      }
      break;
    }
    case KvScales::ds_mla: {
      using namespace kv_fp8_ds_mla;
      for (std::int64_t g = 0; g < kLatent / kGroup; ++g) scales[g] = load_scale(head, g);
      scales[kLatent / kGroup] = 1.f;
      break;
    }
  }
}

void StoredPairs::widen(const std::byte* src, std::int64_t n, std::byte* dst) const {
  kernels_.pairs->widen[static_cast<int>(codes_of(format_.dtype))](
      src, n, reinterpret_cast<BFloat16*>(dst));
}

}  // namespace fovea::cpu
