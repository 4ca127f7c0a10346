// A step of MLA decode on the caller's own memory and block table, checked against float64.
#include <cmath>
#include <vector>

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"

int main() {
  using namespace fovea;
  constexpr int kHeads = 16, kLatent = 512, kRow = kLatent + 64, kBlock = 16, kKeys = 40;
  const std::vector<std::int32_t> blocks = {5, 2, 7}, query_start_loc = {0, 1}, seq_lens = {kKeys};
  std::vector<float> pool(8 * kBlock * kRow, NAN), q(kHeads * kRow), out(kHeads * kLatent);
  std::vector<double> k, v;  // What the pool holds, in the order of the tokens.
  for (int i = 0; i < kKeys * kRow; ++i) {
    const int token = i / kRow, slot = blocks[token / kBlock] * kBlock + token % kBlock;
    k.push_back(pool[slot * kRow + i % kRow] = std::sin(0.1f * (i % 7919)));
    if (i % kRow < kLatent) v.push_back(k.back());
  }
  for (int i = 0; i < kHeads * kRow; ++i) q[i] = std::cos(0.1f * (i % 6007));

  const Runtime runtime;  // Threads, scratch memory, the best kernels of this processor.
  const PagedKvCache cache = PagedKvCache::view(pool.data(), {DType::f32, kRow}, {8, kBlock});
  MlaDecodeParams params;
  params.q_latent = TensorView::of(q.data(), {1, kHeads, kRow}).slice(2, 0, kLatent);
  params.q_pe = TensorView::of(q.data(), {1, kHeads, kRow}).slice(2, kLatent, kRow);
  params.cache = &cache;
  params.block_table = {.data = blocks.data(), .requests = 1, .width = 3, .stride = 3};
  params.out = TensorView::of(out.data(), {1, kHeads, kLatent});
  params.sm_scale = 0.07f;
  mla_decode_once(runtime, params, query_start_loc, seq_lens);

  const std::vector<double> exact_q(q.begin(), q.end());
  const oracle::AttentionResult expected = oracle::attention({.num_queries = 1,
                                                              .num_keys = kKeys,
                                                              .num_heads = kHeads,
                                                              .num_kv_heads = 1,
                                                              .qk_dim = kRow,
                                                              .v_dim = kLatent,
                                                              .sm_scale = params.sm_scale,
                                                              .q = exact_q,
                                                              .k = k,
                                                              .v = v});
  bool is_right = true;
  for (std::size_t i = 0; i < out.size(); ++i)
    is_right &= std::abs(out[i] - expected.out[i]) < 1e-5;
  return is_right ? 0 : 1;
}
