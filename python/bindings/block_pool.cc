#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "cache.h"
#include "fovea/block_pool.h"
#include "fovea/error.h"

namespace fovea::python {
namespace {

void check_tokens(std::int64_t tokens, const char* name) {
  if (tokens >= 0) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " is " + std::to_string(tokens) + "; it must not be negative");
}

/// A table and its pool, which must outlive it.
struct PyBlockTable {
  nb::object pool;
  BlockTable table;
};

std::vector<std::int32_t> blocks_of(const PyBlockTable& self) {
  return {self.table.blocks().begin(), self.table.blocks().end()};
}

std::vector<std::int64_t> slots_of(const PyBlockTable& self, std::int64_t begin, std::int64_t end) {
  check_tokens(begin, "begin");
  check_tokens(end - begin, "end - begin");
  const BlockTable& table = self.table;
  if (end > table.capacity()) {
    throw Error(ErrorCode::invalid_argument, "end is " + std::to_string(end) +
                                                 "; the table has room for " +
                                                 std::to_string(table.capacity()) + " tokens");
  }
  std::vector<std::int64_t> slots(static_cast<std::size_t>(end - begin));
  table.slots(begin, slots);
  return slots;
}

std::optional<std::pair<std::int32_t, std::int32_t>> make_writable(PyBlockTable& self,
                                                                   std::int64_t position) {
  check_tokens(position, "position");
  const auto copy = self.table.make_writable(position);
  if (!copy) return {};
  return std::pair(copy->src, copy->dst);
}

}  // namespace

void bind_block_pool(nb::module_& m) {
  nb::class_<BlockPool>(m, "BlockPool", R"(Reference-counted ids of blocks. No byte is touched here.

Args:
    num_blocks: ids are 0 to num_blocks - 1.
    block_size: tokens of a block, at least 1.

Raises:
    ValueError: numbers out of range; ids that are out of range or free.)")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("num_blocks"), nb::arg("block_size"))
      .def_prop_ro("num_blocks", &BlockPool::num_blocks)
      .def_prop_ro("block_size", &BlockPool::block_size)
      .def_prop_ro("num_free", &BlockPool::num_free, "Blocks that allocate() can still give.")
      .def_prop_ro("num_used", &BlockPool::num_used)
      .def("grow", &BlockPool::grow, nb::arg("num_blocks"), "Adds free ids up to num_blocks - 1.")
      .def("allocate", &BlockPool::allocate, "A block with one reference, or None.")
      .def("retain", &BlockPool::retain, nb::arg("block"), "One more reference.")
      .def("release", &BlockPool::release, nb::arg("block"), "One reference less.")
      .def("ref_count", &BlockPool::ref_count, nb::arg("block"));

  nb::class_<PyBlockTable>(m, "BlockTable", R"(The blocks of one sequence, in order.

Holds one reference of each until it goes away.)")
      .def(
          "__init__",
          [](PyBlockTable* self, nb::object pool) {
            BlockPool& blocks = nb::cast<BlockPool&>(pool);
            new (self) PyBlockTable{std::move(pool), BlockTable(blocks)};
          },
          nb::arg("pool"), nb::sig("def __init__(self, pool: BlockPool) -> None"))
      .def_prop_ro("blocks", &blocks_of, "Block ids, as a row of a block table.")
      .def_prop_ro(
          "capacity", [](const PyBlockTable& self) { return self.table.capacity(); },
          "Tokens that the blocks hold.")
      .def(
          "grow_to",
          [](PyBlockTable& self, std::int64_t tokens) {
            check_tokens(tokens, "num_tokens");
            return self.table.grow_to(tokens);
          },
          nb::arg("num_tokens"),
          "Allocates until so many tokens fit. False, with nothing changed, when blocks lack.")
      .def(
          "shrink_to",
          [](PyBlockTable& self, std::int64_t tokens) {
            check_tokens(tokens, "num_tokens");
            self.table.shrink_to(tokens);
          },
          nb::arg("num_tokens"), "Releases the blocks that so many tokens do not need.")
      .def(
          "fork",
          [](const PyBlockTable& self) { return PyBlockTable{self.pool, self.table.fork()}; },
          "A second table on the same blocks.")
      .def("make_writable", &make_writable, nb::arg("position"),
           "(src, dst) of the block that must be copied before the position is written, or None.")
      .def("slots", &slots_of, nb::arg("begin"), nb::arg("end"),
           "Slot ids of the tokens [begin, end).");
}

}  // namespace fovea::python
