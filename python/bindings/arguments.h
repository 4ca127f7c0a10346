// The arguments of one call, as what ops take.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "dlpack.h"
#include "fovea/ops.h"
#include "runtime.h"

namespace fovea::python {

/// Converts arguments and keeps what the results refer to until it goes away, with the GIL held.
class Arguments {
 public:
  Arguments() = default;
  /// `runtime`: a Runtime or None.
  explicit Arguments(nb::handle runtime);

  /// That which the call named; or that of the first tensor on a GPU and the stream that it is
  /// ready on; or that of this process.
  const SharedRuntime& runtime() const;

  TensorView read(nb::handle object, const char* name);
  TensorView write(nb::handle object, const char* name);
  /// None is an absent view.
  TensorView read_optional(nb::handle object, const char* name);
  TensorView write_optional(nb::handle object, const char* name);

  /// Integers: an array of int32 as it is, or one of int64, of a GPU or a sequence, copied. Throws
  /// TypeError on anything else, ValueError beyond 32 bits.
  std::span<const std::int32_t> integers(nb::handle object, const char* name);
  /// Slot ids: an array of int32 or int64, or a sequence, copied.
  TensorView slots(nb::handle object);
  /// [requests, width]: an array of int32 as it is, or one of int64, of a GPU or a sequence of
  /// sequences, copied and filled up with -1.
  BlockTableView block_table(nb::handle object);
  /// A KvCache, or a tensor [num_blocks, block_size, ...] of a compute dtype.
  const PagedKvCache* cache(nb::handle object, const char* name, Access access);

 private:
  TensorView import(nb::handle object, const char* name, Access access);
  /// An array of integers in host memory.
  TensorView import_on_host(nb::handle object, const char* name);

  const SharedRuntime* runtime_ = nullptr;  ///< Null: that of this process.
  std::optional<void*> stream_;             ///< Of calls on a GPU.
  std::vector<nb::object> owners_;
  std::deque<std::vector<std::int32_t>> copies_;
  std::deque<std::vector<std::int64_t>> slots_;
  std::deque<PagedKvCache> caches_;
};

/// The choice that `value` names. Throws ValueError that lists the names.
template <class T, std::size_t count>
T choice(const std::string& value, const char* name,
         const std::pair<const char*, T> (&choices)[count]) {
  std::string names;
  for (const auto& [known, result] : choices) {
    if (value == known) return result;
    names += (names.empty() ? "\"" : ", \"") + std::string(known) + "\"";
  }
  throw nb::value_error((std::string(name) + " is \"" + value + "\"; it must be one of " + names)
                            .c_str());
}

}  // namespace fovea::python
