#include "backends/cpu/peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "backends/cpu/backend.h"
#include "backends/cpu/kernels.h"
#include "fovea/tensor.h"

namespace fovea::cpu {
namespace {

const Kernels& kernels_of(const OpContext& ctx) {
#if defined(__x86_64__)
  for (const Backend* backend : ctx.backends) {
    if (backend == cpu_backend(Isa::avx512_bf16)) return avx512_bf16::kKernels;
    if (backend == cpu_backend(Isa::avx512)) return avx512::kKernels;
    if (backend == cpu_backend(Isa::avx2)) return avx2::kKernels;
  }
#elif defined(__aarch64__)
  for (const Backend* backend : ctx.backends) {
    if (backend == cpu_backend(Isa::neon)) return neon::kKernels;
  }
#endif
  return scalar::kKernels;
}

/// Seconds of the fastest of a few runs: other work on the machine only ever slows one down.
template <class F>
double best_seconds(F&& fn) {
  constexpr int kRuns = 5;
  double best = 1e30;
  for (int i = 0; i < kRuns; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count());
  }
  return best;
}

/// GFLOP/s of `rounds` on all threads at once.
double gflops_of(ThreadPool& pool, std::int64_t (*rounds)(std::int64_t, float*)) {
  constexpr std::int64_t kRounds = 2'000'000;  // Some 10 milliseconds.
  const std::int64_t threads = pool.num_threads();
  // A cache line per thread: flops, and what keeps the compiler from dropping the work.
  struct alignas(64) Slot {
    std::int64_t flops = 0;
    float sink = 0.5f;
  };
  std::vector<Slot> slots(static_cast<std::size_t>(threads));
  const double seconds = best_seconds([&] {
    pool.run(threads, [&](std::int64_t i) {
      Slot& slot = slots[static_cast<std::size_t>(i)];
      slot.sink = 0.5f;
      slot.flops = rounds(kRounds, &slot.sink);
    });
  });
  double flops = 0;
  for (const Slot& slot : slots) flops += static_cast<double>(slot.flops);
  return flops / seconds * 1e-9;
}

}  // namespace

double f32_fma_gflops(const OpContext& ctx) {
  return gflops_of(*ctx.pool, kernels_of(ctx).multiply_add_rounds);
}

double bf16_dot_gflops(const OpContext& ctx) {
  const PairKernels* pairs = kernels_of(ctx).pairs;
  return pairs ? gflops_of(*ctx.pool, pairs->multiply_add_rounds) : 0;
}

double read_gbps(const OpContext& ctx) {
  const Kernels& kernels = kernels_of(ctx);
  // 1 GiB: beyond any last level cache.
  constexpr std::int64_t kFloats = 256 * 1024 * 1024;
  constexpr std::int64_t kPiece = 64 * 1024;  // Small, so that the threads end together.
  // Of the pages that caches have.
  const Tensor memory = Tensor::empty(DType::f32, {kFloats});
  float* floats = memory.view().ptr<float>({0});
  std::fill_n(floats, kFloats, 1.f);
  std::vector<float> sums(kFloats / kPiece);
  const double seconds = best_seconds([&] {
    ctx.pool->run(kFloats / kPiece, [&](std::int64_t i) {
      sums[static_cast<std::size_t>(i)] = kernels.sum(floats + i * kPiece, kPiece);
    });
  });
  return static_cast<double>(kFloats * std::int64_t{sizeof(float)}) / seconds * 1e-9;
}

}  // namespace fovea::cpu
