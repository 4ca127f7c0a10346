// Cutting an op over rows into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/thread_pool.h"

namespace fovea::cpu {

/// Elements that are worth a task of their own: some microseconds, what waking a thread costs.
inline constexpr std::int64_t kElementsPerTask = 16 * 1024;

/// Multiply-adds of attention that are worth a second thread: some ten microseconds.
inline constexpr std::int64_t kProductsPerTask = 512 * 1024;

/// Calls fn(begin, end) for pieces that cover [0, rows), at most one per thread.
template <class F>
void for_row_ranges(ThreadPool& pool, std::int64_t rows, std::int64_t row_elements, F&& fn) {
  const std::int64_t elements = rows * std::max<std::int64_t>(row_elements, 1);
  const std::int64_t worth = (elements + kElementsPerTask - 1) / kElementsPerTask;
  const std::int64_t pieces = std::min<std::int64_t>({pool.num_threads(), worth, rows});
  if (pieces <= 1) {
    if (rows > 0) fn(std::int64_t{0}, rows);
    return;
  }
  pool.run(pieces, [&](std::int64_t i) { fn(rows * i / pieces, rows * (i + 1) / pieces); });
}

}  // namespace fovea::cpu
