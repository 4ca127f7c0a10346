#include "cache.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "fovea/error.h"

namespace fovea::python {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

}  // namespace

KvFormat plain_format_of(const TensorView& view, const char* name) {
  if (view.ndim != 3 && view.ndim != 4) {
    refuse(std::string(name) + " is " + to_string(view) +
           "; a tensor as a cache must be [num_blocks, block_size, row] or [num_blocks, "
           "block_size, heads, width]");
  }
  if (!is_compute_dtype(view.dtype)) {
    refuse(std::string(name) + " is " + to_string(view) +
           "; a tensor as a cache must be of float32, float16 or bfloat16. For other formats make "
           "a PagedKvCache over it");
  }
  KvFormat format{view.dtype, view.shape[2] * (view.ndim == 4 ? view.shape[3] : 1)};
  format.num_heads = view.ndim == 4 ? view.shape[2] : 1;
  return format;
}

PagedKvCache view_as_cache(const TensorView& view, const KvFormat& format, const char* name) {
  if (view.ndim < 3) {
    refuse(std::string(name) + " is " + to_string(view) +
           "; it must be [num_blocks, block_size, ...]");
  }
  TensorView rows = view;
  for (; rows.ndim > 3; rows = rows.fuse(rows.ndim - 2)) {
  }
  const bool as_bytes = rows.dtype == DType::u8 && format.dtype != DType::u8;
  const std::int64_t width = as_bytes ? format.row_bytes() : format.row_elements;
  if ((!as_bytes && rows.dtype != format.dtype) || rows.shape[2] != width ||
      (rows.strides[2] != 1 && width > 1)) {
    refuse(std::string(name) + " is " + to_string(view) + "; in the format " + format.name() +
           " its rows must be contiguous, " + std::to_string(format.row_elements) + " " +
           std::string(name_of(format.dtype)) + " or " + std::to_string(format.row_bytes()) +
           " uint8");
  }
  if (rows.strides[0] < 0 || rows.strides[1] < 0) {
    refuse(std::string(name) + " is " + to_string(view) + "; its strides must not be negative");
  }
  KvCacheLayout layout;
  layout.num_blocks = rows.shape[0];
  layout.block_size = rows.shape[1];
  // An extent of 1 may have any stride: the defaults then.
  if (rows.shape[1] > 1) layout.row_stride = bytes_of(rows.dtype, rows.strides[1]);
  if (rows.shape[0] > 1) layout.block_stride = bytes_of(rows.dtype, rows.strides[0]);
  return PagedKvCache::view(view.data, format, layout, view.device);
}

KvCache::KvCache(const KvFormat& format, std::int64_t num_blocks, std::int64_t block_size)
    : cache_(PagedKvCache::allocate(format,
                                    {.num_blocks = num_blocks, .block_size = block_size})) {}

KvCache::KvCache(nb::object storage, const KvFormat& format)
    // Torch may give a tensor other memory, as a module's `to` does: a second one keeps this.
    : object_(nb::hasattr(storage, "detach") ? nb::object(storage.attr("detach")())
                                             : std::move(storage)),
      storage_(import_tensor(object_, "storage", Access::read)),
      cache_(view_as_cache(storage_.view, format, "storage")) {}

void KvCache::copy_block(std::int64_t src, std::int64_t dst) const {
  for (const std::int64_t block : {src, dst}) {
    if (block < 0 || block >= cache_.num_blocks()) {
      refuse("block is " + std::to_string(block) + "; it must be in [0, " +
             std::to_string(cache_.num_blocks()) + ")");
    }
  }
  if (cache_.device().type == Device::Type::cpu) return cache_.copy_block(src, dst);
  object_[nb::int_(dst)] = object_[nb::int_(src)];
}

void bind_cache(nb::module_& m) {
  nb::class_<KvFormat>(m, "KvFormat", "How a cache stores one token, byte for byte.")
      .def_static(
          "latent",
          [](const std::string& name, std::int64_t kv_lora_rank, std::int64_t qk_rope_head_dim,
             float scale) {
            return latent_format(name, kv_lora_rank, qk_rope_head_dim, {scale, scale});
          },
          nb::arg("name"), nb::arg("kv_lora_rank"), nb::arg("qk_rope_head_dim"), nb::kw_only(),
          nb::arg("scale") = 1.f,
          "Rows [kv_c | k_pe] of MLA in the format of that name, see kv_format_names().")
      .def_static(
          "heads",
          [](const std::string& name, std::int64_t num_heads, std::int64_t head_dim, float scale) {
            return heads_format(name, num_heads, head_dim, scale);
          },
          nb::arg("name"), nb::arg("num_heads"), nb::arg("head_dim"), nb::kw_only(),
          nb::arg("scale") = 1.f,
          "Keys or values of all heads of a token in the format of that name.")
      .def_prop_ro("name", &KvFormat::name, "\"int8_per_token\".")
      .def_prop_ro("row_bytes", &KvFormat::row_bytes, "Bytes of a token.")
      .def_ro("row_elements", &KvFormat::row_elements, "Values of a token.")
      .def_ro("num_heads", &KvFormat::num_heads, "Key heads in a row; 1 of a latent row.");
  m.def(
      "kv_format_names",
      [] {
        return std::vector<std::string>(kv_format_names().begin(), kv_format_names().end());
      },
      "Names that KvFormat takes: bf16, f16, f32, fp8_e4m3 and so on.");

  nb::class_<KvCache>(m, "KvCache", R"(Blocks of rows of one format, owned or over a tensor.

fovea.PagedKvCache puts one (latent rows) or two (keys and values) under a pool of block ids.)")
      .def_static(
          "allocate",
          [](const KvFormat& format, std::int64_t num_blocks, std::int64_t block_size) {
            return KvCache(format, num_blocks, block_size);
          },
          nb::arg("format"), nb::arg("num_blocks"), nb::arg("block_size"),
          "Own, uninitialised memory.")
      .def_static(
          "over",
          [](nb::object storage, const KvFormat& format) {
            return KvCache(std::move(storage), format);
          },
          nb::arg("storage"), nb::arg("format"), R"(Zero copy over a tensor, which stays alive.

Args:
    storage: [num_blocks, block_size, ...], what follows being one row: elements of the format's
        dtype, or its bytes as uint8. Blocks and rows may lie apart.)")
      .def_prop_ro("format", [](const KvCache& c) { return c.get().format(); })
      .def_prop_ro("num_blocks", [](const KvCache& c) { return c.get().num_blocks(); })
      .def_prop_ro("block_size", [](const KvCache& c) { return c.get().block_size(); })
      .def_prop_ro(
          "nbytes",
          [](const KvCache& c) {
            return PagedKvCache::required_bytes(c.get().format(), c.get().layout());
          },
          "From the first to the last byte.")
      .def("copy_block", &KvCache::copy_block, nb::arg("src"), nb::arg("dst"),
           "Copies the rows of a block.");
}

}  // namespace fovea::python
