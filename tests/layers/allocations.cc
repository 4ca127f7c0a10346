#include "layers/allocations.h"

#include "support/malloc_counter.h"

namespace fovea::test {

std::int64_t count_allocations(const std::function<void()>& fn) { return count_mallocs(fn); }

}  // namespace fovea::test
