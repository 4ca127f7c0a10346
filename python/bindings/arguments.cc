#include "arguments.h"

#include <nanobind/stl/string.h>

#include <limits>

#include "fovea/error.h"

namespace fovea::python {
namespace {

std::int32_t to_int32(std::int64_t value, const char* name) {
  if (value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + " holds " +
                                                 std::to_string(value) +
                                                 ", which does not fit 32 bits");
  }
  return static_cast<std::int32_t>(value);
}

bool is_sequence(nb::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

std::int64_t to_integer(nb::handle item, const char* name) {
  const nb::object index = nb::steal(PyNumber_Index(item.ptr()));  // NumPy's integers too.
  if (!index.is_valid()) {
    PyErr_Clear();
    throw nb::type_error(
        (std::string(name) + " holds a " + name_of_type(item) + "; it must hold integers").c_str());
  }
  std::int64_t value = 0;
  if (!nb::try_cast(index, value, false)) {
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " holds an integer that does not fit 64 bits");
  }
  return value;
}

void check_integer_array(const TensorView& view, int ndim, const char* name) {
  if (view.dtype != DType::i32 && view.dtype != DType::i64) {
    throw nb::type_error((std::string(name) + " is " + to_string(view) +
                          "; it must hold int32 or int64")
                             .c_str());
  }
  if (view.ndim != ndim) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + " is " + to_string(view) +
                                                 "; it must have " + std::to_string(ndim) +
                                                 " dimensions");
  }
}

/// Elements of a one-dimensional array of int32 or int64.
void append_integers(const TensorView& view, const char* name, std::vector<std::int32_t>& out) {
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    out.push_back(view.dtype == DType::i32 ? *view.ptr<std::int32_t>({i})
                                           : to_int32(*view.ptr<std::int64_t>({i}), name));
  }
}

void append_integers(nb::handle sequence, const char* name, std::vector<std::int32_t>& out) {
  for (nb::handle item : sequence) {
    out.push_back(to_int32(to_integer(item, name), name));
  }
}

}  // namespace

Arguments::Arguments(nb::handle runtime) {
  if (runtime.is_none()) return;
  runtime_ = &runtime_of(runtime);
  const OpContext& ctx = runtime_->get().context();
  if (ctx.memory.device.type == Device::Type::cuda) stream_ = ctx.stream;
}

const SharedRuntime& Arguments::runtime() const {
  return runtime_ ? *runtime_ : runtime_of(nb::none());
}

TensorView Arguments::import(nb::handle object, const char* name, Access access) {
  ImportedTensor imported = import_tensor(object, name, access, stream_);
  const Device& device = imported.view.device;
  if (device.type == Device::Type::cuda && !runtime_) {
    try {
      runtime_ = &cuda_runtime_of(device.index, imported.stream);
    } catch (const Error& error) {
      throw Error(error.code(), std::string(name) + " is on cuda:" + std::to_string(device.index) +
                                    "; " + error.what());
    }
    stream_ = imported.stream;
  }
  if (imported.owner.is_valid()) owners_.push_back(std::move(imported.owner));
  return imported.view;
}

TensorView Arguments::import_on_host(nb::handle object, const char* name) {
  const TensorView view = import(object, name, Access::read);
  if (view.device.type == Device::Type::cpu) return view;
  ImportedTensor copy = copy_to_host(object, name);
  owners_.push_back(std::move(copy.owner));
  return copy.view;
}

TensorView Arguments::read(nb::handle object, const char* name) {
  return import(object, name, Access::read);
}

TensorView Arguments::write(nb::handle object, const char* name) {
  return import(object, name, Access::write);
}

TensorView Arguments::read_optional(nb::handle object, const char* name) {
  return object.is_none() ? TensorView{} : read(object, name);
}

TensorView Arguments::write_optional(nb::handle object, const char* name) {
  return object.is_none() ? TensorView{} : write(object, name);
}

std::span<const std::int32_t> Arguments::integers(nb::handle object, const char* name) {
  if (is_sequence(object)) {
    append_integers(object, name, copies_.emplace_back());
    return copies_.back();
  }
  const TensorView view = import_on_host(object, name);
  check_integer_array(view, 1, name);
  if (view.dtype == DType::i32 && view.is_contiguous()) {
    return {view.ptr<const std::int32_t>(), static_cast<std::size_t>(view.shape[0])};
  }
  append_integers(view, name, copies_.emplace_back());
  return copies_.back();
}

TensorView Arguments::slots(nb::handle object) {
  const char* const name = "slot_mapping";
  if (!is_sequence(object)) return read(object, name);
  std::vector<std::int64_t>& slots = slots_.emplace_back();
  slots.reserve(nb::len(object) + 1);  // Never null.
  for (nb::handle item : object) slots.push_back(to_integer(item, name));
  return TensorView::of(slots.data(), {static_cast<std::int64_t>(slots.size())});
}

BlockTableView Arguments::block_table(nb::handle object) {
  const char* const name = "block_table";
  std::vector<std::vector<std::int32_t>> rows;
  if (is_sequence(object)) {
    for (nb::handle row : object) {
      if (!is_sequence(row)) {
        throw nb::type_error(("block_table holds a " + name_of_type(row) +
                              "; it must be an array [requests, width] or a list of lists")
                                 .c_str());
      }
      append_integers(row, name, rows.emplace_back());
    }
  } else {
    const TensorView view = import_on_host(object, name);
    check_integer_array(view, 2, name);
    if (view.dtype == DType::i32 && (view.strides[1] == 1 || view.shape[1] <= 1)) {
      return {view.ptr<const std::int32_t>(), view.shape[0], view.shape[1], view.strides[0]};
    }
    for (std::int64_t i = 0; i < view.shape[0]; ++i) {
      append_integers(view.select(0, i), name, rows.emplace_back());
    }
  }
  std::size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.size());
  std::vector<std::int32_t>& table = copies_.emplace_back();
  table.reserve(rows.size() * width + 1);  // Never null.
  for (const auto& row : rows) {
    table.insert(table.end(), row.begin(), row.end());
    table.insert(table.end(), width - row.size(), -1);
  }
  return {table.data(), static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(width),
          static_cast<std::int64_t>(width)};
}

const PagedKvCache* Arguments::cache(nb::handle object, const char* name, Access access) {
  if (nb::isinstance<KvCache>(object)) {
    const KvCache& cache = nb::cast<const KvCache&>(object);
    if (access == Access::write && cache.read_only()) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(name) + " lies over a read-only tensor; it is written to");
    }
    // Which stream has its rows ready may differ from call to call.
    if (cache.get().device().type == Device::Type::cuda) import(cache.storage(), name, access);
    return &cache.get();
  }
  const TensorView view = import(object, name, access);
  caches_.push_back(view_as_cache(view, plain_format_of(view, name), name));
  return &caches_.back();
}

}  // namespace fovea::python
