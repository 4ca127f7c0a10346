/* fovea/fovea.h from C: every function once, against loops in double, and every status. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fovea/fovea.h"

enum { kHeads = 2, kLatent = 6, kRope = 2, kRow = kLatent + kRope, kKeys = 5, kBlock = 4 };

static int failures = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  printf("FAILED: %s (last error: %s)\n", what, fovea_last_error());
  ++failures;
}

static void expect_near(const float* got, const double* expected, int count, const char* what) {
  int worst = 0;
  for (int i = 0; i < count; ++i) {
    if (!(fabs(got[i] - expected[i]) <= fabs(got[worst] - expected[worst]))) worst = i;
  }
  if (fabs(got[worst] - expected[worst]) <= 1e-5) return;
  printf("FAILED: %s at %d: expected %g, got %g\n", what, worst, expected[worst], got[worst]);
  ++failures;
}

static fovea_tensor f32(float* data, int ndim, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  fovea_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = FOVEA_F32;
  tensor.ndim = ndim;
  int64_t stride = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    tensor.shape[d] = shape[d];
    tensor.strides[d] = stride;
    stride *= shape[d];
  }
  return tensor;
}

static fovea_tensor columns(fovea_tensor tensor, int64_t begin, int64_t end) {
  const int last = tensor.ndim - 1;
  tensor.data = (float*)tensor.data + begin;
  tensor.shape[last] = end - begin;
  return tensor;
}

static void fill(float* values, int count, unsigned seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / (1 << 24) * 2 - 1;
  }
}

/* out [kHeads][v_dim] and lse [kHeads] of one query over rows [kKeys][kRow] from their start. */
static void reference(const float* q, const float* rows, int qk_dim, int v_dim, double sm_scale,
                      int keys, double* out, double* lse) {
  for (int h = 0; h < kHeads; ++h) {
    double sum = 0;
    memset(out + h * v_dim, 0, sizeof(double) * (size_t)v_dim);
    for (int k = 0; k < keys; ++k) {
      double score = 0;
      for (int d = 0; d < qk_dim; ++d) score += (double)q[h * qk_dim + d] * rows[k * kRow + d];
      const double weight = exp(score * sm_scale);
      sum += weight;
      for (int d = 0; d < v_dim; ++d) out[h * v_dim + d] += weight * rows[k * kRow + d];
    }
    for (int d = 0; d < v_dim; ++d) out[h * v_dim + d] /= sum;
    lse[h] = log(sum);
  }
}

static float rows[kKeys * kRow], q[kHeads * kRow], out[kHeads * kRow], lse[kHeads];
static double expected[kHeads * kRow], expected_lse[kHeads];
static const int32_t kBlocks[] = {1, 0, -7};
static const int32_t kQueryStart[] = {0, 1}, kSeqLens[] = {kKeys};
static const fovea_step kStep = {NULL, {1, kQueryStart, kSeqLens}, FOVEA_CAUSAL};
static const fovea_block_table kTable = {kBlocks, 1, 3, 3};

static fovea_tensor slots_of(int64_t* slots) {
  for (int i = 0; i < kKeys; ++i) slots[i] = (int64_t)kBlocks[i / kBlock] * kBlock + i % kBlock;
  fovea_tensor tensor = {0};
  tensor.data = slots;
  tensor.dtype = FOVEA_I64;
  tensor.ndim = 1;
  tensor.shape[0] = kKeys;
  tensor.strides[0] = 1;
  return tensor;
}

static void test_latent(const fovea_runtime* runtime) {
  const fovea_cache_layout layout = {.num_blocks = 2, .block_size = kBlock};
  fovea_cache* cache = NULL;
  expect(fovea_latent_cache_create("f32", kLatent, kRope, 1, &layout, &cache) == FOVEA_OK, "cache");
  int64_t slots[kKeys];
  const fovea_tensor slot_mapping = slots_of(slots);
  const fovea_tensor all = f32(rows, 2, kKeys, kRow, 0);
  const fovea_tensor kv_c = columns(all, 0, kLatent), k_pe = columns(all, kLatent, kRow);
  expect(fovea_kv_append(runtime, &kv_c, &k_pe, &slot_mapping, cache) == FOVEA_OK, "kv_append");

  float gathered[kKeys * kRow] = {0};
  const fovea_tensor into = f32(gathered, 2, kKeys, kRow, 0);
  const int32_t start = 0;
  expect(fovea_kv_gather(runtime, cache, &kTable, &start, kSeqLens, &into) == FOVEA_OK, "gather");
  expect(memcmp(gathered, rows, sizeof rows) == 0, "gathered rows are those that were stored");

  const fovea_tensor query = f32(q, 3, 1, kHeads, kRow);
  fovea_mla_decode_params params = {.q_latent = columns(query, 0, kLatent),
                                    .q_pe = columns(query, kLatent, kRow),
                                    .cache = cache,
                                    .block_table = kTable,
                                    .step = kStep,
                                    .out = f32(out, 3, 1, kHeads, kLatent),
                                    .lse = f32(lse, 2, kHeads, 1, 0),
                                    .sm_scale = 0.5f};
  reference(q, rows, kRow, kLatent, 0.5, kKeys, expected, expected_lse);
  expect(fovea_mla_decode(runtime, &params) == FOVEA_OK, "mla_decode");
  expect_near(out, expected, kHeads * kLatent, "mla_decode out");
  expect_near(lse, expected_lse, kHeads, "mla_decode lse");

  fovea_plan* plan = NULL;
  const fovea_variant causal = FOVEA_CAUSAL;
  expect(fovea_plan_create(runtime, &kStep.lengths, &causal, 1, &plan) == FOVEA_OK, "plan");
  params.step = (fovea_step){.plan = plan};
  memset(out, 0, sizeof out);
  expect(fovea_mla_decode(runtime, &params) == FOVEA_OK, "mla_decode with a plan");
  expect_near(out, expected, kHeads * kLatent, "mla_decode out with a plan");
  fovea_plan_destroy(plan);

  params.step = kStep;
  params.sm_scale = NAN;
  expect(fovea_mla_decode(runtime, &params) == FOVEA_INVALID_ARGUMENT, "NaN is refused");
  expect(strstr(fovea_last_error(), "sm_scale") != NULL, "the text names sm_scale");
  params.sm_scale = 0.5f;
  params.q_pe.dtype = 99;
  expect(fovea_mla_decode(runtime, &params) == FOVEA_INVALID_ARGUMENT, "unknown dtype");
  params.q_pe.dtype = FOVEA_F32;
  params.q_pe.device.type = 7;
  expect(fovea_mla_decode(runtime, &params) == FOVEA_INVALID_ARGUMENT, "unknown device");
  params.q_pe.device.type = FOVEA_CUDA;
  expect(fovea_mla_decode(runtime, &params) == FOVEA_UNSUPPORTED, "a tensor of another device");
  expect(strstr(fovea_last_error(), "q_pe is on CUDA device 0") != NULL, "the text names q_pe");
  fovea_cache_destroy(cache);
}

static void test_heads(const fovea_runtime* runtime) {
  /* One key head of kRow, and values that are the first kLatent channels of the same rows. */
  const fovea_cache_layout layout = {.num_blocks = 2, .block_size = kBlock};
  fovea_cache *keys = NULL, *values = NULL;
  expect(fovea_heads_cache_create("f32", 1, kRow, 1, &layout, &keys) == FOVEA_OK, "keys");
  expect(fovea_heads_cache_create("f32", 1, kLatent, 1, &layout, &values) == FOVEA_OK, "values");
  int64_t slots[kKeys];
  const fovea_tensor slot_mapping = slots_of(slots);
  const fovea_tensor k = f32(rows, 3, kKeys, 1, kRow), v = columns(k, 0, kLatent);
  expect(fovea_gqa_append(runtime, &k, &v, &slot_mapping, keys, values) == FOVEA_OK, "gqa_append");

  fovea_attention_decode_params decode = {.q = f32(q, 3, 1, kHeads, kRow),
                                          .k_cache = keys,
                                          .v_cache = values,
                                          .block_table = kTable,
                                          .step = kStep,
                                          .out = f32(out, 3, 1, kHeads, kLatent),
                                          .sm_scale = 0.5f};
  expect(fovea_attention_decode(runtime, &decode) == FOVEA_OK, "attention_decode");
  expect_near(out, expected, kHeads * kLatent, "attention_decode out");

  float parts[2][kHeads * kLatent], part_lse[2][kHeads];
  const int32_t part_lens[2] = {2, kKeys - 2};
  for (int part = 0; part < 2; ++part) {
    float* first = rows + (part == 0 ? 0 : 2 * kRow);
    const fovea_tensor part_k = f32(first, 3, part_lens[part], 1, kRow);
    const fovea_attention_prefill_params prefill = {
        .q = decode.q,
        .k = part_k,
        .v = columns(part_k, 0, kLatent),
        .step = {NULL, {1, kQueryStart, &part_lens[part]}, FOVEA_CAUSAL},
        .out = f32(parts[part], 3, 1, kHeads, kLatent),
        .lse = f32(part_lse[part], 2, kHeads, 1, 0),
        .sm_scale = 0.5f};
    expect(fovea_attention_prefill(runtime, &prefill) == FOVEA_OK, "attention_prefill");
  }
  const int32_t too_long[2] = {INT32_MAX, INT32_MAX}, starts[3] = {0, 1, 1};
  const fovea_attention_prefill_params overflow = {
      .q = decode.q,
      .k = k,
      .v = v,
      .step = {NULL, {2, starts, too_long}, FOVEA_CAUSAL},
      .out = decode.out,
      .sm_scale = 0.5f};
  expect(fovea_attention_prefill(runtime, &overflow) == FOVEA_INVALID_ARGUMENT, "sum of lengths");
  const fovea_merge_state_params merge = {.prefix_out = f32(parts[0], 3, 1, kHeads, kLatent),
                                          .prefix_lse = f32(part_lse[0], 2, kHeads, 1, 0),
                                          .suffix_out = f32(parts[1], 3, 1, kHeads, kLatent),
                                          .suffix_lse = f32(part_lse[1], 2, kHeads, 1, 0),
                                          .out = f32(out, 3, 1, kHeads, kLatent),
                                          .lse = f32(lse, 2, kHeads, 1, 0)};
  memset(out, 0, sizeof out);
  expect(fovea_merge_state(runtime, &merge) == FOVEA_OK, "merge_state");
  expect_near(out, expected, kHeads * kLatent, "merged out");
  expect_near(lse, expected_lse, kHeads, "merged lse");
  fovea_cache_destroy(keys);
  fovea_cache_destroy(values);
}

static void test_refusals(void) {
  fovea_runtime* runtime = NULL;
  const fovea_runtime_options tpu = {.backend = "tpu"};
  expect(fovea_runtime_create(&tpu, &runtime) == FOVEA_INVALID_ARGUMENT, "backend");
  expect(strstr(fovea_last_error(), "tpu") != NULL, "the text has the backend");
  expect(fovea_runtime_create(NULL, NULL) == FOVEA_INVALID_ARGUMENT, "NULL runtime");
  expect(fovea_mla_decode(NULL, NULL) == FOVEA_INVALID_ARGUMENT, "NULL params");
  const fovea_cache_layout layout = {.num_blocks = 2, .block_size = kBlock};
  fovea_cache* cache = NULL;
  expect(fovea_latent_cache_create("fp8_e4m3fnuz", kLatent, kRope, 1, &layout, &cache) ==
             FOVEA_UNSUPPORTED,
         "a format that nothing implements");
  expect(cache == NULL && runtime == NULL, "nothing was made");
}

int main(void) {
  fill(rows, kKeys * kRow, 1);
  fill(q, kHeads * kRow, 2);
  fovea_runtime* runtime = NULL;
  const fovea_runtime_options options = {.num_threads = 2, .batch_invariant = 1};
  expect(fovea_runtime_create(&options, &runtime) == FOVEA_OK, "runtime");
  test_latent(runtime);
  test_heads(runtime);
  test_refusals();
  fovea_runtime_destroy(runtime);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
