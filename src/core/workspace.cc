#include "fovea/workspace.h"

#include <algorithm>
#include <limits>

#include "core/aligned_memory.h"
#include "core/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fovea {
namespace {

static_assert(Workspace::kAlignment == kMemoryAlignment);

/// What is not taken is off limits: AddressSanitizer reports a use after the scope's end, or past
/// the bytes that were asked for.
void forbid([[maybe_unused]] std::byte* memory, [[maybe_unused]] std::int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(memory, static_cast<std::size_t>(bytes));
#endif
}

void permit([[maybe_unused]] std::byte* memory, [[maybe_unused]] std::int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory, static_cast<std::size_t>(bytes));
#endif
}

}  // namespace

void Workspace::Free::operator()(std::byte* memory) const {
  release(source, memory);
}

Workspace::~Workspace() { permit(memory_.get(), capacity_); }

void Workspace::reserve(std::int64_t bytes) {
  FOVEA_CHECK(bytes >= 0 && bytes <= std::numeric_limits<std::int64_t>::max() - kAlignment,
              invalid_argument, "bytes is {}, but must be a size in memory", bytes);
  FOVEA_CHECK(used_ == 0, invalid_argument,
              "reserve({}) while {} bytes of the workspace are taken: reserve before a step", bytes,
              used_);
  if (bytes <= capacity_) return;
  permit(memory_.get(), capacity_);
  memory_.reset();  // Before the new one, so that the two never stand side by side.
  capacity_ = 0;
  const MemorySource& source = memory_.get_deleter().source;
  memory_.reset(allocate(source, rounded(bytes), "Workspace"));
  capacity_ = rounded(bytes);
  forbid(memory_.get(), capacity_);
}

WorkspaceScope::~WorkspaceScope() {
  forbid(workspace_.memory_.get() + mark_, workspace_.used_ - mark_);
  workspace_.used_ = mark_;
}

std::byte* WorkspaceScope::take_bytes(std::int64_t bytes) {
  // Taking nothing works with a workspace that holds nothing, and gives a present pointer.
  alignas(Workspace::kAlignment) static std::byte nothing[Workspace::kAlignment];
  FOVEA_CHECK(bytes >= 0, invalid_argument, "bytes is {}, but must not be negative", bytes);
  if (bytes == 0) return nothing;
  const std::int64_t left = workspace_.capacity_ - workspace_.used_;
  FOVEA_CHECK(bytes <= left, resource_exhausted,
              "the workspace lacks room: {} bytes are needed on top of the {} taken, but it holds "
              "{}; reserve more before the step",
              bytes, workspace_.used_, workspace_.capacity_);
  // Capacity and used are multiples of the alignment, so the rounded size fits where `bytes` does.
  std::byte* memory = workspace_.memory_.get() + workspace_.used_;
  workspace_.used_ += Workspace::rounded(bytes);
  workspace_.peak_ = std::max(workspace_.peak_, workspace_.used_);
  permit(memory, bytes);
  return memory;
}

std::byte* WorkspaceScope::take_elements(std::int64_t count, std::int64_t element_bytes) {
  std::int64_t bytes = 0;
  FOVEA_CHECK(!__builtin_mul_overflow(count, element_bytes, &bytes), invalid_argument,
              "count is {}: as many elements of {} bytes do not fit 64 bits", count, element_bytes);
  return take_bytes(bytes);
}

TensorView WorkspaceScope::take(DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  std::int64_t count = 1;
  for (std::int64_t extent : shape) count *= extent;
  view.data = take_bytes(bytes_of(dtype, count));
  view.device = workspace_.memory_.get_deleter().source.device;
  return view;
}

}  // namespace fovea
