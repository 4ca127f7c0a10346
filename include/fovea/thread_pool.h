// How an op spreads its work, so that a caller can bring its own threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace fovea {

/// A borrowed callable void(std::int64_t task). Never allocates; must not outlive what it refers
/// to.
class TaskRef {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef>)
      TaskRef(F&& f)  // NOLINT(google-explicit-constructor): callers pass lambdas.
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, std::int64_t task) {
          (*static_cast<std::remove_reference_t<F>*>(object))(task);
        }) {}
  void operator()(std::int64_t task) const { call_(object_, task); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t);
};

/// Runs independent tasks. Tasks may run in any order, with fewer threads than tasks, and never
/// wait for each other. A task does not throw.
class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  /// The most tasks that run at once. Ops cut their work by this number.
  virtual int num_threads() const = 0;
  /// Calls fn(0) to fn(num_tasks - 1), each once, and returns when all have returned. Allocates
  /// nothing. Not reentrant.
  virtual void run(std::int64_t num_tasks, TaskRef fn) = 0;
};

/// Processors that this process may run on.
int num_available_processors();

/// num_threads - 1 std::threads that spin briefly, then sleep; the caller works too. 0 takes the
/// number of processors this process may use.
std::unique_ptr<ThreadPool> make_std_thread_pool(int num_threads = 0);

/// The default of the whole library (fovea::fovea): OpenMP's team, shared with oneDNN.
std::unique_ptr<ThreadPool> make_openmp_thread_pool(int num_threads = 0);

}  // namespace fovea
