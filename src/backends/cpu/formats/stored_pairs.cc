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

const BFloat16* StoredPairs::load(const std::byte* row, std::int64_t head, BFloat16* copy,
                                  float* scales) const {
  const std::byte* bytes = head_of(row, head);
  const std::int64_t elements = format_.head_elements();
  switch (format_.scales) {
    case KvScales::none:
      scales[0] = 1.f;
      return reinterpret_cast<const BFloat16*>(bytes);
    case KvScales::per_tensor:
      scales[0] = format_.scale;
      widen(bytes, elements, copy);
      return copy;
    case KvScales::per_token: {
      using kv_per_token::load_scale;
      const std::int64_t first = format_.first_group;
      int group = 0;
      if (first > 0) scales[group++] = load_scale(format_, bytes, 0);
      if (first < elements) scales[group++] = load_scale(format_, bytes, 1);
      widen(bytes, elements, copy);
      return copy;
    }
    case KvScales::ds_mla: {
      using namespace kv_fp8_ds_mla;
      for (std::int64_t g = 0; g < kLatent / kGroup; ++g) scales[g] = load_scale(bytes, g);
      scales[kLatent / kGroup] = 1.f;
      widen(bytes, kLatent, copy);
      std::memcpy(copy + kLatent, bytes + kRopeAt, kRope * sizeof(BFloat16));
      return copy;
    }
  }
  return copy;
}

void StoredPairs::widen(const std::byte* src, std::int64_t n, BFloat16* dst) const {
  kernels_.pairs->widen[static_cast<int>(codes_of(format_.dtype))](src, n, dst);
}

}  // namespace fovea::cpu
