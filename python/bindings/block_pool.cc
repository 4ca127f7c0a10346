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

std::vector<std::int32_t> blocks_of(const BlockTable& table) {
  return {table.blocks().begin(), table.blocks().end()};
}

std::vector<std::int64_t> slots_of(const BlockTable& table, std::int64_t begin, std::int64_t end) {
  check_tokens(begin, "begin");
  check_tokens(end - begin, "end - begin");
  if (end > table.capacity()) {
    throw Error(ErrorCode::invalid_argument, "end is " + std::to_string(end) +
                                                 "; the table has room for " +
                                                 std::to_string(table.capacity()) + " tokens");
  }
  std::vector<std::int64_t> slots(static_cast<std::size_t>(end - begin));
  table.slots(begin, slots);
  return slots;
}

std::optional<std::pair<std::int32_t, std::int32_t>> make_writable(BlockTable& table,
                                                                   std::int64_t position) {
  check_tokens(position, "position");
  const auto copy = table.make_writable(position);
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
      .def("allocate", &BlockPool::allocate, "A block with one reference, or None.")
      .def("retain", &BlockPool::retain, nb::arg("block"), "One more reference.")
      .def("release", &BlockPool::release, nb::arg("block"), "One reference less.")
      .def("ref_count", &BlockPool::ref_count, nb::arg("block"));

  nb::class_<BlockTable>(m, "BlockTable", R"(The blocks of one sequence, in order.

Holds one reference of each until it goes away.)")
      .def(nb::init<BlockPool&>(), nb::arg("pool"), nb::keep_alive<1, 2>())
      .def_prop_ro("blocks", &blocks_of, "Block ids, as a row of a block table.")
      .def_prop_ro("capacity", &BlockTable::capacity, "Tokens that the blocks hold.")
      .def(
          "grow_to",
          [](BlockTable& table, std::int64_t tokens) {
            check_tokens(tokens, "num_tokens");
            return table.grow_to(tokens);
          },
          nb::arg("num_tokens"),
          "Allocates until so many tokens fit. False, with nothing changed, when blocks lack.")
      .def(
          "shrink_to",
          [](BlockTable& table, std::int64_t tokens) {
            check_tokens(tokens, "num_tokens");
            table.shrink_to(tokens);
          },
          nb::arg("num_tokens"), "Releases the blocks that so many tokens do not need.")
      .def("fork", &BlockTable::fork, nb::keep_alive<0, 1>(), "A second table on the same blocks.")
      .def("make_writable", &make_writable, nb::arg("position"),
           "(src, dst) of the block that must be copied before the position is written, or None.")
      .def("slots", &slots_of, nb::arg("begin"), nb::arg("end"),
           "Slot ids of the tokens [begin, end).");
}

}  // namespace fovea::python
