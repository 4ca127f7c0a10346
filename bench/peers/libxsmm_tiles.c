/* Products of the attention tiles by libxsmm 1.17 (Debian's libxsmm-dev), whose operands stay in the caches: what
 * a kernel could reach at most whose softmax, conversions and memory cost nothing.
 *
 *   cc -O2 libxsmm_tiles.c -o libxsmm_tiles -lxsmm -lxsmmnoblas -lpthread -ldl -lm && ./libxsmm_tiles > OUT.json
 *
 * One thread. Scores are [tokens][heads]: Q is packed in pairs of channels, keys are rows as they lie in a cache.
 * P V is [heads][channels]: values are packed in pairs of tokens. */
#include <libxsmm.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { kRounds = 9 };
static const double kSeconds = 0.02;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* C[n][m] = B[n][k] A[k][m] in f32; A in pairs of k where it is bf16. */
struct Tile {
  const char* name;
  libxsmm_blasint m, n, k;
};

static void* operand(size_t count, int is_bf16) {
  void* p = aligned_alloc(64, (count * (is_bf16 ? 2 : 4) + 63) / 64 * 64);
  for (size_t i = 0; i < count; ++i) {
    const float x = (float)rand() / (float)RAND_MAX - 0.5f;
    if (is_bf16) {
      union {
        float f;
        unsigned u;
      } bits = {x};
      ((unsigned short*)p)[i] = (unsigned short)(bits.u >> 16);
    } else {
      ((float*)p)[i] = x;
    }
  }
  return p;
}

/* GFLOP/s, the median of rounds; 0 where libxsmm has no kernel. */
static double gflops(const struct Tile* tile, int is_bf16) {
  const float one = 1, zero = 0;
  const int flags = LIBXSMM_GEMM_FLAG_VNNI_A;
  libxsmm_bsmmfunction bf16 = NULL;
  libxsmm_smmfunction f32 = NULL;
  if (is_bf16) {
    bf16 = libxsmm_bsmmdispatch(tile->m, tile->n, tile->k, NULL, NULL, NULL, &one, &zero, &flags, NULL);
  } else {
    f32 = libxsmm_smmdispatch(tile->m, tile->n, tile->k, NULL, NULL, NULL, &one, &zero, NULL, NULL);
  }
  if (!bf16 && !f32) return 0;
  void* a = operand((size_t)tile->m * (size_t)tile->k, is_bf16);
  void* b = operand((size_t)tile->k * (size_t)tile->n, is_bf16);
  float* c = operand((size_t)tile->m * (size_t)tile->n, 0);
  double rounds[kRounds];
  for (int round = 0; round < kRounds; ++round) {
    long calls = 0;
    const double start = now();
    double taken = 0;
    for (; taken < kSeconds; taken = now() - start) {
      for (int i = 0; i < 16; ++i, ++calls) {
        if (is_bf16) {
          bf16((const libxsmm_bfloat16*)a, (const libxsmm_bfloat16*)b, c);
        } else {
          f32((const float*)a, (const float*)b, c);
        }
      }
    }
    rounds[round] = 2.0 * tile->m * tile->n * tile->k * (double)calls / taken * 1e-9;
  }
  qsort(rounds, kRounds, sizeof *rounds, compare);
  free(a);
  free(b);
  free(c);
  return rounds[kRounds / 2];
}

int main(void) {
  static const struct Tile kTiles[] = {
      {"scores_h16_t64_c576", 16, 64, 576},  {"scores_h128_t64_c576", 128, 64, 576},
      {"values_h16_t128_c512", 512, 16, 128}, {"values_h128_t128_c512", 512, 128, 128},
      {"scores_q64_t64_c128", 64, 64, 128},   {"values_q64_t64_c128", 128, 64, 64},
  };
  const int count = (int)(sizeof kTiles / sizeof *kTiles);
  libxsmm_init();
  printf("{\n  \"peer\": \"libxsmm %s, target %s\",\n  \"threads\": 1,\n  \"cases\": [\n", LIBXSMM_VERSION,
         libxsmm_get_target_arch());
  for (int i = 0; i < count; ++i) {
    printf("    {\"case\": \"%s\", \"f32_gflops\": %.1f, \"bf16_gflops\": %.1f}%s\n", kTiles[i].name,
           gflops(&kTiles[i], 0), gflops(&kTiles[i], 1), i + 1 < count ? "," : "");
  }
  printf("  ]\n}\n");
  return 0;
}
