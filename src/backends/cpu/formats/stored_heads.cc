#include "backends/cpu/formats/stored_heads.h"

#include <span>

#include "backends/cpu/formats/codes.h"
#include "kv/formats/format.h"
#include "kv/formats/fp8_ds_mla/codec.h"
#include "kv/formats/per_token/codec.h"

namespace fovea::cpu {
void StoredHeads::load(const std::byte* row, std::int64_t head, float* dst) const {
  const std::byte* bytes = row + head * head_bytes_;
  switch (format_.scales) {
    case KvScales::none:
      kernels_.load[static_cast<int>(format_.dtype)](bytes, elements(), dst);
      return;
    case KvScales::per_tensor:
      return load_codes(bytes, elements(), format_.scale, dst);
    case KvScales::per_token:
      return load_per_token(bytes, dst);
    case KvScales::ds_mla:
      return load_ds_mla(bytes, dst);
  }
}

/// Group after group, so that the zeros behind one are written over by the next.
void StoredHeads::load_per_token(const std::byte* head, float* dst) const {
  const std::int64_t first = format_.first_group;
  load_codes(head, first, kv_per_token::load_scale(format_, head, 0), dst);
  load_codes(head + bytes_of(format_.dtype, first), elements() - first,
             kv_per_token::load_scale(format_, head, 1), dst + first);
}

void StoredHeads::load_ds_mla(const std::byte* row, float* dst) const {
  using namespace kv_fp8_ds_mla;
  for (std::int64_t g = 0; g < kLatent / kGroup; ++g) {
    load_codes(row + g * kGroup, kGroup, load_scale(row, g), dst + g * kGroup);
  }
  kernels_.load[static_cast<int>(DType::bf16)](row + kRopeAt, kRope, dst + kLatent);
}

void StoredHeads::load_codes(const std::byte* src, std::int64_t n, float scale, float* dst) const {
  kernels_.load_codes[static_cast<int>(codes_of(format_.dtype))](src, n, scale, dst);
}

void StoredHeads::store(const float* src, std::byte* row, std::int64_t head) const {
  std::byte* bytes = row + head * head_bytes_;
  if (format_.scales == KvScales::none) {
    kernels_.store[static_cast<int>(format_.dtype)](src, 1.f, elements(), bytes);
    return;
  }
  encode_head(format_, std::span(src, static_cast<std::size_t>(elements())),
              std::span(bytes, static_cast<std::size_t>(head_bytes_)));
}

}  // namespace fovea::cpu
