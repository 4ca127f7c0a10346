// Somebody else's program: own threads, own memory, own block table; links fovea::ops and nothing
// more.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "fovea/ops.h"
#include "fovea/runtime.h"

namespace {

class OwnThreadPool : public fovea::ThreadPool {
 public:
  int num_threads() const override { return 2; }
  void run(std::int64_t num_tasks, fovea::TaskRef fn) override {
    std::atomic<std::int64_t> next{0};
    const auto work = [&] {
      for (std::int64_t task; (task = next.fetch_add(1)) < num_tasks;) fn(task);
    };
    std::thread helper(work);
    work();
    helper.join();
    tasks_ += num_tasks;
  }
  std::int64_t tasks() const { return tasks_; }

 private:
  std::int64_t tasks_ = 0;
};

constexpr int kHeads = 16;
constexpr int kLatent = 512;
constexpr int kRow = kLatent + 64;
constexpr int kBlockSize = 32;
constexpr int kNumBlocks = 40;
constexpr int kKeys = 1000;
constexpr float kScale = 0.07f;

/// One head of attention by its definition, over rows in the order of the tokens.
std::vector<double> attend(const float* q, const std::vector<const float*>& rows) {
  std::vector<double> scores;
  for (const float* row : rows) {
    double score = 0;
    for (int c = 0; c < kRow; ++c) score += static_cast<double>(q[c]) * row[c];
    scores.push_back(score * kScale);
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  std::vector<double> out(kLatent, 0.0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double weight = std::exp(scores[i] - largest);
    sum += weight;
    for (std::size_t c = 0; c < kLatent; ++c) out[c] += weight * rows[i][c];
  }
  for (double& x : out) x /= sum;
  return out;
}

}  // namespace

int main() {
  std::vector<float> pool(static_cast<std::size_t>(kNumBlocks) * kBlockSize * kRow);
  std::vector<float> q(kHeads * kRow);
  std::vector<float> out(kHeads * kLatent, NAN);
  for (std::size_t i = 0; i < pool.size(); ++i) {
    pool[i] = std::sin(0.1f * static_cast<float>(i % 7919));
  }
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::cos(0.1f * static_cast<float>(i % 6007));
  std::vector<std::int32_t> blocks;
  std::vector<const float*> rows;
  for (int token = 0; token < kKeys; ++token) {
    if (token % kBlockSize == 0) blocks.push_back(kNumBlocks - 1 - token / kBlockSize);
    rows.push_back(&pool[(static_cast<std::size_t>(blocks.back()) * kBlockSize +
                          static_cast<std::size_t>(token % kBlockSize)) *
                         kRow]);
  }

  OwnThreadPool threads;
  fovea::RuntimeOptions options;
  options.pool = &threads;
  const fovea::Runtime runtime(options);
  const auto cache =
      fovea::PagedKvCache::view(pool.data(), {fovea::DType::f32, kRow}, {kNumBlocks, kBlockSize});
  const auto query = fovea::TensorView::of(q.data(), {1, kHeads, kRow});
  fovea::MlaDecodeParams params;
  params.q_latent = query.slice(2, 0, kLatent);
  params.q_pe = query.slice(2, kLatent, kRow);
  params.cache = &cache;
  const auto width = static_cast<std::int64_t>(blocks.size());
  params.block_table = {blocks.data(), 1, width, width};
  params.out = fovea::TensorView::of(out.data(), {1, kHeads, kLatent});
  params.sm_scale = kScale;
  const std::vector<std::int32_t> query_start_loc = {0, 1};
  const std::vector<std::int32_t> seq_lens = {kKeys};
  fovea::mla_decode_once(runtime, params, query_start_loc, seq_lens);

  double worst = 0;
  for (int head = 0; head < kHeads; ++head) {
    const std::vector<double> expected = attend(&q[static_cast<std::size_t>(head) * kRow], rows);
    for (std::size_t c = 0; c < kLatent; ++c) {
      const double error =
          std::abs(out[static_cast<std::size_t>(head) * kLatent + c] - expected[c]);
      worst = error <= worst ? worst : error;  // NaN becomes the worst, and stays.
    }
  }
  std::printf("%s: worst error %.2g, %lld tasks on own threads\n", runtime.backend().data(), worst,
              static_cast<long long>(threads.tasks()));
  return worst < 1e-5 && threads.tasks() > 0 ? 0 : 1;
}
