#include "dlpack.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <unordered_map>

#include "fovea/error.h"

namespace fovea::python {
namespace {

using DlTensor = nb::dlpack::dltensor;

// DLPack's C types (dlpack.h 1.x, github.com/dmlc/dlpack), as far as they are read here.
constexpr int kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13;
constexpr std::uint32_t kDlMajorVersion = 1;
constexpr std::uint64_t kDlReadOnly = 1;

struct DlVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DlManagedVersioned {
  DlVersion version;
  void* manager;
  void (*deleter)(DlManagedVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};

/// Table of C functions that a tensor type may have as __dlpack_c_exchange_api__.
struct DlExchangeApi {
  DlVersion version;
  DlExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
  int (*current_stream)(int device_type, std::int32_t device_index, void** out);
};

/// Python's str(object).
std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

[[noreturn]] void fail(ErrorCode code, const std::string& message) { throw Error(code, message); }

std::optional<DType> dtype_of_dlpack(const nb::dlpack::dtype& dtype) {
  if (dtype.lanes != 1) return {};
  enum { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kE4M3Fn = 10, kE5M2 = 12, kE8M0 = 14 };
  switch (dtype.code) {
    case kInt:
      if (dtype.bits == 8) return DType::i8;
      if (dtype.bits == 32) return DType::i32;
      if (dtype.bits == 64) return DType::i64;
      return {};
    case kUInt:
      return dtype.bits == 8 ? std::optional(DType::u8) : std::nullopt;
    case kFloat:
      if (dtype.bits == 32) return DType::f32;
      if (dtype.bits == 16) return DType::f16;
      return {};
    case kBFloat:
      return dtype.bits == 16 ? std::optional(DType::bf16) : std::nullopt;
    case kE4M3Fn:
      return DType::f8e4m3fn;
    case kE5M2:
      return DType::f8e5m2;
    case kE8M0:
      return DType::f8e8m0;
    default:
      return {};
  }
}

std::optional<DType> dtype_of_numpy(const std::string& name) {
  static const std::unordered_map<std::string, DType> known = {
      {"float32", DType::f32},
      {"float16", DType::f16},
      {"bfloat16", DType::bf16},
      {"float8_e4m3fn", DType::f8e4m3fn},
      {"float8_e5m2", DType::f8e5m2},
      {"float8_e8m0fnu", DType::f8e8m0},
      {"int8", DType::i8},
      {"uint8", DType::u8},
      {"int32", DType::i32},
      {"int64", DType::i64}};
  const auto found = known.find(name);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

[[noreturn]] void refuse_dtype(nb::handle object, const char* name) {
  const std::string dtype = nb::hasattr(object, "dtype")
                                ? text_of(object.attr("dtype"))
                                : "a dtype of its own";
  throw nb::type_error((std::string(name) + " is a " + name_of_type(object) + " of " + dtype +
                        "; it must be of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, "
                        "float8_e8m0fnu, int8, uint8, int32 or int64")
                           .c_str());
}

/// Gives arrays without elements an address: their own is often null, as that of an absent view.
void give_address(TensorView& view) {
  alignas(64) static char nothing[64];
  if (view.numel() == 0 || !view.data) view.data = nothing;
}

TensorView view_of(const DlTensor& tensor, nb::handle object, const char* name) {
  const int device_type = tensor.device.device_type;
  const bool on_gpu = device_type == kDlCuda || device_type == kDlCudaManaged;
  if (device_type != kDlCpu && device_type != kDlCudaHost && !on_gpu) {
    fail(ErrorCode::unsupported, std::string(name) + " is on a device of DLPack type " +
                                     std::to_string(device_type) +
                                     "; fovea computes on CPUs and NVIDIA GPUs: pass a copy there");
  }
  const std::optional<DType> dtype = dtype_of_dlpack(tensor.dtype);
  if (!dtype) refuse_dtype(object, name);
  if (tensor.ndim > kMaxRank) {
    fail(ErrorCode::invalid_argument, std::string(name) + " has " + std::to_string(tensor.ndim) +
                                          " dimensions; it must have at most " +
                                          std::to_string(kMaxRank));
  }
  const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  TensorView view = TensorView::contiguous(
      static_cast<char*>(tensor.data) + tensor.byte_offset, *dtype, shape);
  if (on_gpu) view.device = {Device::Type::cuda, tensor.device.device_id};
  for (std::size_t d = 0; tensor.strides && d < shape.size(); ++d) {
    view.strides[d] = tensor.strides[d];
  }
  return view;
}

/// The table of a type, or null. Types that have one stay referenced: their addresses are keys.
const DlExchangeApi* exchange_api(nb::handle type) {
  static std::unordered_map<PyObject*, const DlExchangeApi*> known;
  const auto found = known.find(type.ptr());
  if (found != known.end()) return found->second;
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api =
      static_cast<DlExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) PyErr_Clear();
  while (api && api->version.major > kDlMajorVersion) api = api->previous;
  if (api && (api->version.major != kDlMajorVersion || !api->tensor_from_object)) api = nullptr;
  Py_DECREF(capsule);
  if (api) known.emplace(nb::borrow(type).release().ptr(), api);
  return api;
}

/// Turns the pending Python error into a TypeError about the argument.
[[noreturn]] void refuse_export(nb::handle object, const char* name) {
  const nb::python_error error;
  throw nb::type_error((std::string(name) + " is a " + name_of_type(object) +
                        " that DLPack cannot export: " +
                        text_of(error.value()))
                           .c_str());
}

/// Torch's views that stand for the negative of what is stored.
void refuse_negative(nb::handle object, const char* name) {
  const nb::object is_neg = nb::getattr(object, "is_neg", nb::none());
  if (is_neg.is_none() || !nb::cast<bool>(is_neg())) return;
  fail(ErrorCode::invalid_argument, std::string(name) + " has its negative bit set: its elements "
                                    "are not what is stored; pass resolve_neg() of it");
}

/// Nothing where the tensor lies on a GPU and its library works on another stream than `stream`:
/// this way of importing does not order their work.
std::optional<ImportedTensor> from_exchange_api(const DlExchangeApi& api, nb::handle object,
                                                const char* name, std::optional<void*> stream) {
  refuse_negative(object, name);
  DlTensor tensor{};
  if (api.tensor_from_object(object.ptr(), &tensor) != 0) refuse_export(object, name);
  ImportedTensor imported{view_of(tensor, object, name), {}};
  if (imported.view.device.type == Device::Type::cpu) return imported;
  if (!api.current_stream || api.current_stream(tensor.device.device_type, tensor.device.device_id,
                                                &imported.stream) != 0) {
    return {};
  }
  if (stream && *stream != imported.stream) return {};
  return imported;
}

/// NumPy's own description, since its DLPack knows neither ml_dtypes nor read-only arrays.
ImportedTensor from_array_interface(nb::handle object, const char* name) {
  const std::optional<DType> dtype =
      dtype_of_numpy(text_of(object.attr("dtype").attr("name")));
  if (!dtype) refuse_dtype(object, name);
  if (!nb::cast<bool>(object.attr("dtype").attr("isnative"))) {
    fail(ErrorCode::invalid_argument,
         std::string(name) + " has swapped bytes; they must be in this machine's order");
  }
  if (nb::hasattr(object, "mask")) {
    throw nb::type_error((std::string(name) + " is a " + name_of_type(object) +
                          ", whose mask would be lost; pass filled() of it")
                             .c_str());
  }
  const nb::dict interface = nb::cast<nb::dict>(object.attr("__array_interface__"));
  const nb::tuple data = nb::cast<nb::tuple>(interface["data"]);
  const nb::tuple extents = nb::cast<nb::tuple>(interface["shape"]);
  if (extents.size() > static_cast<std::size_t>(kMaxRank)) {
    fail(ErrorCode::invalid_argument, std::string(name) + " has " +
                                          std::to_string(extents.size()) +
                                          " dimensions; it must have at most " +
                                          std::to_string(kMaxRank));
  }
  std::array<std::int64_t, kMaxRank> shape{};
  for (std::size_t d = 0; d < extents.size(); ++d) shape[d] = nb::cast<std::int64_t>(extents[d]);
  TensorView view = TensorView::contiguous(
      reinterpret_cast<void*>(nb::cast<std::uintptr_t>(data[0])), *dtype,
      std::span<const std::int64_t>(shape.data(), extents.size()));
  if (reinterpret_cast<std::uintptr_t>(view.data) %
          static_cast<std::uintptr_t>(bytes_of(*dtype, 1)) !=
      0) {
    fail(ErrorCode::invalid_argument, std::string(name) + " is not aligned to its elements");
  }
  const nb::object strides = interface["strides"];
  if (!strides.is_none()) {
    const std::int64_t bytes = bytes_of(*dtype, 1);
    for (std::size_t d = 0; d < extents.size(); ++d) {
      const std::int64_t stride = nb::cast<std::int64_t>(strides[d]);
      if (stride % bytes != 0) {
        fail(ErrorCode::invalid_argument, std::string(name) + " has a stride of " +
                                              std::to_string(stride) + " bytes; it must be a "
                                              "multiple of its elements' " +
                                              std::to_string(bytes));
      }
      view.strides[d] = stride / bytes;
    }
  }
  return {view, {}, nb::cast<bool>(data[1])};
}

/// What __dlpack__(**options) gives, which is asked for version 1 of DLPack where it knows that.
ImportedTensor from_dlpack(nb::handle object, const char* name, nb::dict options) {
  refuse_negative(object, name);
  const nb::object export_tensor = object.attr("__dlpack__");
  nb::dict versioned;
  versioned.update(options);
  versioned["max_version"] = nb::make_tuple(kDlMajorVersion, 0);
  nb::object capsule =
      nb::steal(PyObject_Call(export_tensor.ptr(), nb::tuple().ptr(), versioned.ptr()));
  if (!capsule.is_valid() && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();  // Older than max_version.
    capsule = nb::steal(PyObject_Call(export_tensor.ptr(), nb::tuple().ptr(), options.ptr()));
  }
  if (!capsule.is_valid()) refuse_export(object, name);
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const DlManagedVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    return {view_of(managed->tensor, object, name), capsule, (managed->flags & kDlReadOnly) != 0};
  }
  const auto* tensor =
      static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!tensor) refuse_export(object, name);
  return {view_of(*tensor, object, name), capsule, false};
}

/// Ordered before what is queued on `stream` from now on.
ImportedTensor from_dlpack_on(nb::handle object, const char* name, void* stream) {
  nb::dict options;
  const nb::object device = nb::getattr(object, "__dlpack_device__", nb::none());
  const int type = device.is_none() ? kDlCpu : nb::cast<int>(nb::int_(device()[0]));
  if (type == kDlCuda || type == kDlCudaManaged) {
    // DLPack's number of the default stream is 1.
    options["stream"] = stream ? reinterpret_cast<std::uintptr_t>(stream) : std::uintptr_t{1};
  }
  ImportedTensor imported = from_dlpack(object, name, options);
  imported.stream = stream;
  return imported;
}

/// By the protocols of Python.
ImportedTensor import_slowly(nb::handle object, const char* name, std::optional<void*> stream) {
  ImportedTensor imported;
  if (nb::hasattr(object, "__array_interface__") && nb::hasattr(object, "dtype")) {
    imported = from_array_interface(object, name);
  } else if (nb::hasattr(object, "__dlpack__")) {
    imported = from_dlpack_on(object, name, stream.value_or(nullptr));
  } else {
    throw nb::type_error((std::string(name) + " is a " + name_of_type(object) +
                          "; it must be a tensor of torch, NumPy, JAX or another library with "
                          "__dlpack__")
                             .c_str());
  }
  give_address(imported.view);
  return imported;
}

/// JAX's arrays, which their export does not say.
bool is_immutable(nb::handle object) { return name_of_type(object).starts_with("jax"); }

}  // namespace

std::string name_of_type(nb::handle object) {
  const nb::handle type = object.type();
  const std::string module = text_of(type.attr("__module__"));
  const std::string name = text_of(type.attr("__qualname__"));
  return module == "builtins" ? name : module + "." + name;
}

ImportedTensor copy_to_host(nb::handle object, const char* name) {
  nb::dict options;
  options["dl_device"] = nb::make_tuple(kDlCpu, 0);
  options["copy"] = true;
  return from_dlpack(object, name, options);
}

ImportedTensor import_tensor(nb::handle object, const char* name, Access access,
                             std::optional<void*> stream) {
  if (const DlExchangeApi* api = exchange_api(object.type())) {
    if (auto imported = from_exchange_api(*api, object, name, stream)) {
      give_address(imported->view);
      return *std::move(imported);
    }
  }
  ImportedTensor imported = import_slowly(object, name, stream);
  if (access == Access::write && is_immutable(object)) {
    fail(ErrorCode::invalid_argument, std::string(name) + " is a " + name_of_type(object) +
                                          ", which never changes; it is written to");
  }
  if (access == Access::write && imported.read_only) {
    fail(ErrorCode::invalid_argument, std::string(name) + " is read-only; it is written to");
  }
  return imported;
}

}  // namespace fovea::python
