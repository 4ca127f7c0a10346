// Times mla_decode_once for test_call_time.py: one request, 16 heads, 64 keys, one thread. Prints
// the median of many calls in microseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "fovea/ops.h"
#include "fovea/runtime.h"

int main() {
  constexpr std::int64_t kHeads = 16, kLatent = 512, kRope = 64, kKeys = 64, kBlockSize = 16;
  constexpr int kCalls = 2000;
  fovea::Runtime runtime({.num_threads = 1});
  const fovea::Tensor q = fovea::Tensor::zeros(fovea::DType::bf16, {1, kHeads, kLatent + kRope});
  const fovea::Tensor out = fovea::Tensor::empty(fovea::DType::bf16, {1, kHeads, kLatent});
  const fovea::Tensor rows =
      fovea::Tensor::zeros(fovea::DType::bf16, {kKeys / kBlockSize, kBlockSize, kLatent + kRope});
  const auto cache =
      fovea::PagedKvCache::view(rows.view().data, {fovea::DType::bf16, kLatent + kRope},
                                {.num_blocks = kKeys / kBlockSize, .block_size = kBlockSize});
  const std::vector<std::int32_t> blocks = {2, 0, 3, 1};
  const std::vector<std::int32_t> query_start_loc = {0, 1}, seq_lens = {kKeys};
  fovea::MlaDecodeParams params;
  params.q_latent = q.view().slice(2, 0, kLatent);
  params.q_pe = q.view().slice(2, kLatent, kLatent + kRope);
  params.cache = &cache;
  params.block_table = {blocks.data(), 1, 4, 4};
  params.out = out;
  params.sm_scale = 0.1f;
  std::vector<double> times;
  for (int call = 0; call < kCalls; ++call) {
    const auto begin = std::chrono::steady_clock::now();
    fovea::mla_decode_once(runtime, params, query_start_loc, seq_lens);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count());
  }
  std::nth_element(times.begin(), times.begin() + kCalls / 2, times.end());
  std::printf("%.3f\n", times[kCalls / 2]);
}
