// A step of grouped-query decode with a sliding window and sinks, on the caller's own memory and
// block table, checked against float64. Blocks before the window are gone: their ids are -1.
#include <cmath>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"

int main() {
  using namespace fovea;
  constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kRow = kKvHeads * kDim, kBlock = 16;
  constexpr int kKeys = 70, kWindow = 20;  // The query at 69 sees positions 50 to 69.
  const std::vector<std::int32_t> blocks = {-1, -1, -1, 4, 0}, query_start_loc = {0, 1};
  const std::vector<std::int32_t> seq_lens = {kKeys};
  std::vector<float> k_pool(6 * kBlock * kRow, NAN), v_pool(k_pool), out(kHeads * kDim);
  std::vector<float> q(kHeads * kDim), sinks(kHeads);
  std::vector<double> k(kKeys * kRow, NAN), v(k);  // The pools, in the order of the tokens.
  for (int i = (kKeys - kWindow) * kRow; i < kKeys * kRow; ++i) {
    const int token = i / kRow;
    const int slot = blocks[token / kBlock] * kBlock + token % kBlock;
    k[i] = k_pool[slot * kRow + i % kRow] = std::sin(0.1f * (i % 7919));
    v[i] = v_pool[slot * kRow + i % kRow] = std::cos(0.1f * (i % 7907));
  }
  for (int i = 0; i < kHeads * kDim; ++i) q[i] = std::cos(0.1f * (i % 6007));
  for (int i = 0; i < kHeads; ++i) sinks[i] = 0.25f * i;

  const Runtime runtime;
  const PagedKvCache k_cache = PagedKvCache::view(k_pool.data(), {DType::f32, kRow}, {6, kBlock});
  const PagedKvCache v_cache = PagedKvCache::view(v_pool.data(), {DType::f32, kRow}, {6, kBlock});
  AttentionDecodeParams params;
  params.q = TensorView::of(q.data(), {1, kHeads, kDim});
  params.kv = {&k_cache, &v_cache, {blocks.data(), 1, 5, 5}, kKvHeads};
  params.out = TensorView::of(out.data(), {1, kHeads, kDim});
  params.variant.window_left = window_left_of(kWindow);
  params.sm_scale = 0.125f;
  params.sinks = TensorView::of(sinks.data(), {kHeads});
  attention_decode_once(runtime, params, query_start_loc, seq_lens);

  const std::vector<double> exact_q(q.begin(), q.end()), exact_sinks(sinks.begin(), sinks.end());
  oracle::Attention problem;
  problem.num_queries = 1;
  problem.num_keys = kKeys;
  problem.num_heads = kHeads;
  problem.num_kv_heads = kKvHeads;
  problem.qk_dim = problem.v_dim = kDim;
  problem.sm_scale = params.sm_scale;
  problem.window_left = kWindow - 1;
  problem.sinks = exact_sinks;
  problem.q = exact_q;
  problem.k = k;
  problem.v = v;
  const oracle::AttentionResult expected = oracle::attention(problem);
  bool is_right = true;
  for (std::size_t i = 0; i < out.size(); ++i)
    is_right &= std::abs(out[i] - expected.out[i]) < 1e-5;
  return is_right ? 0 : 1;
}
