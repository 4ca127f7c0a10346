// Heap allocations, for all files of this test program.
#pragma once

#include <cstdint>
#include <functional>

namespace fovea::test {

/// How many there are while fn runs, on any thread; -1 where a sanitizer owns malloc.
std::int64_t count_allocations(const std::function<void()>& fn);

}  // namespace fovea::test
