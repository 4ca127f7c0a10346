// Scratch memory of a step, and what everything that computes is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace fovea {

/// A stack of scratch memory. Grows only through `reserve`; `take` never allocates.
class Workspace {
 public:
  static constexpr std::int64_t kAlignment = 64;  ///< A cache line; also a full zmm register.

  Workspace() : Workspace(MemorySource{}) {}
  explicit Workspace(const MemorySource& source) : memory_(nullptr, Free{source}) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  /// Makes room for `bytes` in total. Throws Error(invalid_argument) while anything is taken.
  void reserve(std::int64_t bytes);
  std::int64_t capacity() const { return capacity_; }
  std::int64_t used() const { return used_; }
  /// The most that was ever taken at once since reset_peak().
  std::int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = used_; }

  /// What `take` uses for `bytes`: rounded up to kAlignment. Sum these to size a workspace.
  static constexpr std::int64_t rounded(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  friend class WorkspaceScope;
  struct Free {
    MemorySource source;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::int64_t capacity_ = 0;
  std::int64_t used_ = 0;
  std::int64_t peak_ = 0;
};

/// Takes from a workspace; gives everything back when it ends. Scopes nest.
class WorkspaceScope {
 public:
  explicit WorkspaceScope(Workspace& workspace) : workspace_(workspace), mark_(workspace.used_) {}
  ~WorkspaceScope();
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;

  /// Uninitialised and aligned to Workspace::kAlignment; never null. Throws
  /// Error(resource_exhausted) that says how many bytes are needed and how many there are.
  std::byte* take_bytes(std::int64_t bytes);
  template <class T>
  T* take(std::int64_t count) {
    return reinterpret_cast<T*>(take_elements(count, static_cast<std::int64_t>(sizeof(T))));
  }
  TensorView take(DType dtype, std::initializer_list<std::int64_t> shape);

 private:
  std::byte* take_elements(std::int64_t count, std::int64_t element_bytes);

  Workspace& workspace_;
  std::int64_t mark_;
};

/// What a computation is given besides its operands. Used by one thread at a time.
struct ExecutionContext {
  ThreadPool* pool = nullptr;
  Workspace* workspace = nullptr;
  /// Of the device that computes: weights and the workspace lie in it. Ops take views of that
  /// device, and host views that it can address (on a GPU: pinned or managed memory).
  MemorySource memory = {};
  /// Of a GPU: the cudaStream_t that work is queued on. Calls return before it is done.
  void* stream = nullptr;
};

/// Returns when the work that was queued on ctx is done.
inline void wait(const ExecutionContext& ctx) {
  if (ctx.memory.wait) ctx.memory.wait(ctx.memory.device, ctx.stream);
}

}  // namespace fovea
