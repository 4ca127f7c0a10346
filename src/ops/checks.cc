#include "ops/checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "core/check.h"
#include "ops/backend.h"
#include "ops/index_view.h"
#include "ops/overlap.h"

namespace fovea {
namespace {

/// "[T, N, 64] with T = 3, N = 16".
std::string describe(std::initializer_list<Extent> extents) {
  std::string shape;
  std::string values;
  for (const Extent& extent : extents) {
    shape += (shape.empty() ? "[" : ", ") + std::string(extent.symbol);
    if (extent.value != Extent::kAny) {
      values += (values.empty() ? " with " : ", ") + std::string(extent.symbol) + " = " +
                std::to_string(extent.value);
    }
  }
  return shape + "]" + values;
}

/// Every element's byte offset fits int64, so that no address computation overflows.
bool is_addressable(const TensorView& view) {
  std::int64_t reach = 0;
  std::int64_t count = 1;
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
    if (view.shape[d] == 0) return true;
    std::int64_t stride = 0;
    std::int64_t span = 0;
    if (view.strides[d] == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(std::abs(view.strides[d]), bytes_of(view.dtype, 1), &stride) ||
        __builtin_mul_overflow(stride, view.shape[d] - 1, &span) ||
        __builtin_add_overflow(reach, span, &reach) ||
        __builtin_mul_overflow(count, view.shape[d], &count)) {
      return false;
    }
  }
  // Twice, because an overlap check adds the reaches of two views.
  return reach < std::numeric_limits<std::int64_t>::max() / 4;
}

/// Not TensorView::numel, which is 0 for every view without data.
bool has_elements(const TensorView& view) {
  const auto* end = view.shape.begin() + view.ndim;
  return std::find(view.shape.begin(), end, 0) == end;
}

}  // namespace

void check_devices(const OpContext& ctx, const char* op, std::initializer_list<Operand> operands) {
  const Device& device = ctx.memory.device;
  for (const Operand& operand : operands) {
    if (operand.data == nullptr || operand.device == device) continue;
    const bool on_host = operand.device.type == Device::Type::cpu;
    FOVEA_CHECK(on_host, unsupported, "{}: {} is on {}; this context computes on {}", op,
                operand.name, to_string(operand.device), to_string(device));
    const bool addressable = !ctx.backends.empty() &&
                             ctx.backends.front()->addresses_host_memory != nullptr &&
                             ctx.backends.front()->addresses_host_memory(operand.data);
    FOVEA_CHECK(addressable, unsupported,
                "{}: {} is in host memory that {} cannot address; it must be in device memory, "
                "pinned or managed",
                op, operand.name, to_string(device));
  }
}

void check_view(const Argument& argument, const TensorView& view,
                std::initializer_list<Extent> extents) {
  FOVEA_CHECK(view.ndim > 0, invalid_argument, "{}: {} is absent; it must be {}", argument.op,
              argument.name, describe(extents));
  bool fits = static_cast<std::size_t>(view.ndim) == extents.size();
  std::size_t d = 0;
  for (const Extent& extent : extents) {
    if (!fits) break;
    const std::int64_t actual = view.shape[d++];
    fits = extent.value == Extent::kAny ? actual >= 0 : actual == extent.value;
  }
  FOVEA_CHECK(fits, invalid_argument, "{}: {} is {}; it must be {}", argument.op, argument.name,
              to_string(view), describe(extents));
  FOVEA_CHECK(is_addressable(view), invalid_argument,
              "{}: {} is {}; its offsets must fit 64-bit integers", argument.op, argument.name,
              to_string(view));
}

void check_data(const Argument& argument, const TensorView& view) {
  FOVEA_CHECK(view.data != nullptr || !has_elements(view), invalid_argument,
              "{}: {} is {} at a null pointer; it must point at its elements", argument.op,
              argument.name, to_string(view));
}

void check_compute_dtype(const Argument& argument, const TensorView& view) {
  FOVEA_CHECK(is_compute_dtype(view.dtype), invalid_argument,
              "{}: {} is {}; its dtype must be f32, f16 or bf16", argument.op, argument.name,
              to_string(view));
}

void check_dtype(const Argument& argument, const TensorView& view, DType expected) {
  FOVEA_CHECK(view.dtype == expected, invalid_argument, "{}: {} is {}; its dtype must be {}",
              argument.op, argument.name, to_string(view), name_of(expected));
}

void check_dtype_or_f32(const Argument& argument, const TensorView& view, DType expected) {
  FOVEA_CHECK(view.dtype == expected || view.dtype == DType::f32, invalid_argument,
              "{}: {} is {}; its dtype must be {} or f32", argument.op, argument.name,
              to_string(view), name_of(expected));
}

void check_index_dtype(const Argument& argument, const TensorView& view) {
  FOVEA_CHECK(view.dtype == DType::i32 || view.dtype == DType::i64, invalid_argument,
              "{}: {} is {}; its dtype must be i32 or i64", argument.op, argument.name,
              to_string(view));
}

void check_unit_inner_stride(const Argument& argument, const TensorView& view) {
  const auto last = static_cast<std::size_t>(view.ndim - 1);
  FOVEA_CHECK(view.shape[last] <= 1 || view.strides[last] == 1, invalid_argument,
              "{}: {} is {}; its innermost stride must be 1", argument.op, argument.name,
              to_string(view));
}

void check_sm_scale(const char* op, float sm_scale) {
  FOVEA_CHECK(std::isfinite(sm_scale) && sm_scale > 0.f, invalid_argument,
              "{}: sm_scale is {}; it must be positive and finite, as the -0.5th power of an "
              "expanded head's width",
              op, sm_scale);
}

void check_variant(const char* op, const AttentionVariant& variant) {
  FOVEA_CHECK(variant.attention_chunk >= 0 && (variant.attention_chunk == 0 || variant.causal),
              invalid_argument,
              "{}: variant.attention_chunk is {} of a {} variant; it must be at least 0, and 0 "
              "without causal",
              op, variant.attention_chunk, variant.causal ? "causal" : "non-causal");
  FOVEA_CHECK(variant.soft_cap >= 0.f && std::isfinite(variant.soft_cap), invalid_argument,
              "{}: variant.soft_cap is {}; it must be finite and at least 0", op, variant.soft_cap);
}

void check_sinks(const Argument& argument, const TensorView& sinks, std::int64_t num_heads) {
  check_view(argument, sinks, {{"N", num_heads}});
  check_dtype(argument, sinks, DType::f32);
}

void check_output(const Argument& argument, const TensorView& view) {
  check_data(argument, view);
  FOVEA_CHECK(!overlaps_itself(view), invalid_argument,
              "{}: {} is {}; elements of an output must not share memory", argument.op,
              argument.name, to_string(view));
}

void check_disjoint(const Argument& a, const TensorView& view_a, const char* name_b,
                    const TensorView& view_b) {
  FOVEA_CHECK(!overlaps(view_a, view_b), invalid_argument,
              "{}: {} is {} and shares memory with {}, {}; they must be disjoint", a.op, a.name,
              to_string(view_a), name_b, to_string(view_b));
}

void check_cache(const char* op, const PagedKvCache* cache, std::int64_t row_elements,
                 const char* what, const char* name) {
  FOVEA_CHECK(cache != nullptr, invalid_argument,
              "{}: {} is null; it must be a PagedKvCache with rows of {} elements", op, name,
              row_elements);
  FOVEA_CHECK(cache->format().row_elements == row_elements, invalid_argument,
              "{}: {} has rows of {} elements; they must be {} = {}", op, name,
              cache->format().row_elements, what, row_elements);
}

void check_latent_cache(const char* op, const PagedKvCache* cache, std::int64_t latent,
                        std::int64_t rope_dim) {
  check_cache(op, cache, latent + rope_dim, "L + R");
  const KvFormat& format = cache->format();
  if (format.scales != KvScales::per_token) return;
  FOVEA_CHECK(format.num_heads == 1 && format.first_group == latent, invalid_argument,
              "{}: cache has {} heads with a first group of {}; it must have 1 with L = {} "
              "(latent_format makes such)",
              op, format.num_heads, format.first_group, latent);
}

void check_heads_cache(const char* op, const PagedKvCache* cache, std::int64_t num_heads,
                       std::int64_t head_dim, const char* what, const char* name) {
  check_cache(op, cache, num_heads * head_dim, what, name);
  const KvFormat& format = cache->format();
  FOVEA_CHECK(format.scales != KvScales::ds_mla, unsupported,
              "{}: {} is in fp8_ds_mla; it must be in another format, as that is a latent row", op,
              name);
  FOVEA_CHECK(format.scales == KvScales::none || format.num_heads == num_heads, invalid_argument,
              "{}: {} has {} heads; it must have Hk = {} (heads_format makes such)", op, name,
              format.num_heads, num_heads);
}

TensorView bytes_of_rows(const PagedKvCache& cache) {
  const KvCacheLayout& layout = cache.layout();
  TensorView view;
  view.data = cache.num_blocks() > 0 ? cache.row(0, 0) : nullptr;
  view.dtype = DType::u8;
  view.ndim = 3;
  view.shape = {layout.num_blocks, layout.block_size, cache.format().row_bytes()};
  view.strides = {layout.block_stride, layout.row_stride, 1};
  return view;
}

void check_slots(const char* op, const TensorView& slot_mapping, std::int64_t num_slots) {
  if (!is_on_host(slot_mapping)) return;
  for (std::int64_t t = 0; t < slot_mapping.shape[0]; ++t) {
    const std::int64_t slot = index_at(slot_mapping, t);
    FOVEA_CHECK(slot >= -1 && slot < num_slots, invalid_argument,
                "{}: slot_mapping[{}] is {}; it must be -1 (skip) or in [0, {})", op, t, slot,
                num_slots);
  }
}

void check_block_table(const char* op, const BlockTableView& table, std::int64_t requests,
                       bool on_device) {
  FOVEA_CHECK(on_device == (table.device != Device{}), invalid_argument,
              "{}: block_table is on {}; it must be on {}", op, to_string(table.device),
              on_device ? "a GPU, as device_seq_lens are" : "the CPU");
  FOVEA_CHECK(table.requests >= requests, invalid_argument,
              "{}: block_table has {} rows; it needs one for each of {} requests", op,
              table.requests, requests);
  FOVEA_CHECK(table.width >= 0 && (table.requests <= 1 || table.stride >= table.width),
              invalid_argument,
              "{}: block_table has width {} and stride {}; the stride must be at least the width",
              op, table.width, table.stride);
  FOVEA_CHECK(table.data != nullptr || requests == 0 || table.width == 0, invalid_argument,
              "{}: block_table.data is null; it must hold {} rows of {} block ids", op,
              table.requests, table.width);
}

void check_block_row(const char* op, const BlockTableView& table, const PagedKvCache& cache,
                     std::int64_t request, std::int64_t first_key, std::int64_t num_keys) {
  if (first_key >= num_keys) return;
  const std::int64_t block_size = cache.block_size();
  const std::int64_t last = (num_keys - 1) / block_size;
  FOVEA_CHECK(last < table.width, invalid_argument,
              "{}: block_table has {} columns; request {} with {} keys in blocks of {} needs {}",
              op, table.width, request, num_keys, block_size, last + 1);
  if (table.device != Device{}) return;  // What the host cannot read is not checked.
  const std::int32_t* blocks = table.data + request * table.stride;
  for (std::int64_t b = first_key / block_size; b <= last; ++b) {
    FOVEA_CHECK(blocks[b] >= 0 && blocks[b] < cache.num_blocks(), invalid_argument,
                "{}: block_table[{}, {}] is {}; it must be in [0, {})", op, request, b, blocks[b],
                cache.num_blocks());
  }
}

void check_offsets(const Argument& argument, std::span<const std::int32_t> offsets,
                   std::int64_t limit, const char* limit_name) {
  FOVEA_CHECK(!offsets.empty() && offsets.front() == 0, invalid_argument,
              "{}: {} has {} entries and starts at {}; it must start at 0", argument.op,
              argument.name, offsets.size(), offsets.empty() ? 0 : offsets.front());
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    FOVEA_CHECK(offsets[i] >= offsets[i - 1], invalid_argument,
                "{}: {}[{}] is {} after {}; it must not decrease", argument.op, argument.name, i,
                offsets[i], offsets[i - 1]);
  }
  FOVEA_CHECK(offsets.back() <= limit, invalid_argument,
              "{}: {} ends at {}; it must not pass {} = {}", argument.op, argument.name,
              offsets.back(), limit_name, limit);
}

void write_padding_rows_on_host(const OpContext&, std::int64_t num_actual, const TensorView& out,
                                const TensorView& lse) {
  const auto [tokens, heads, width] =
      std::array<std::int64_t, 3>{out.shape[0], out.shape[1], out.shape[2]};
  const std::int64_t element = bytes_of(out.dtype, 1);
  auto* bytes = static_cast<std::byte*>(out.data);
  for (std::int64_t t = num_actual; t < tokens; ++t) {
    for (std::int64_t n = 0; n < heads; ++n) {
      std::byte* row = bytes + (t * out.strides[0] + n * out.strides[1]) * element;
      const bool adjacent = out.strides[2] == 1;
      const auto run = static_cast<std::size_t>(adjacent ? width * element : element);
      for (std::int64_t d = 0; d < (adjacent ? 1 : width); ++d) {
        std::memset(row + d * out.strides[2] * element, 0, run);
      }
      if (lse) *lse.ptr<float>({n, t}) = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace fovea
