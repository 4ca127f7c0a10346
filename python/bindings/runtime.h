// The runtime that ops run on, shared by Python's threads.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <string>

#include "fovea/runtime.h"

namespace fovea::python {

/// A Runtime with a pool that its ops and matrix products share. One call at a time; others wait.
class SharedRuntime {
 public:
  /// The pool of `options` is made here.
  explicit SharedRuntime(RuntimeOptions options);
  ~SharedRuntime();
  SharedRuntime(const SharedRuntime&) = delete;
  SharedRuntime& operator=(const SharedRuntime&) = delete;

  /// Calls fn(const OpContext&) alone and without the GIL.
  template <class F>
  auto run(F&& fn) const {
    check_process();
    const nanobind::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return fn(runtime_->context());
  }
  /// Whether this process made it: threads do not survive a fork.
  bool belongs_here() const;
  const Runtime& get() const { return *runtime_; }
  /// For plans, which read capacities only.
  const PlanTarget& plan_target() const { return runtime_->context().plan_target; }

 private:
  /// Throws Error(invalid_argument) in a child process.
  void check_process() const;

  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  int process_;
};

/// A Runtime, or for None the one of this process. Throws TypeError on anything else.
const SharedRuntime& runtime_of(nanobind::handle object);

/// That of this process for a GPU and a cudaStream_t. Throws Error(unsupported) as Runtime does.
const SharedRuntime& cuda_runtime_of(int device, void* stream);

void bind_runtime(nanobind::module_& m);

}  // namespace fovea::python
