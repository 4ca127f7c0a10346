// What observers see of a step whose operands are in a device's memory.
#pragma once

#include <deque>

#include "fovea/ops.h"

namespace fovea::engine {

/// Copies that live until the next layer; nothing is copied of what the host has.
class HostMirror {
 public:
  explicit HostMirror(const OpContext& ctx) : ctx_(ctx) {}

  void begin_layer() {
    rows_.clear();
    caches_.clear();
  }
  TensorView rows(const TensorView& rows);
  /// `cache` with the blocks of `table` alone; the others hold anything.
  const PagedKvCache* blocks(const PagedKvCache& cache, const BlockTableView& table);

 private:
  const OpContext& ctx_;
  std::deque<Tensor> rows_;  // Views and pointers into both stay good while they grow.
  std::deque<PagedKvCache> caches_;
};

}  // namespace fovea::engine
