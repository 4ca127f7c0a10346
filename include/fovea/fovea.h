/* The ops for C and for languages that call C: opaque handles, and a status from every call.
 *
 * Meaning, shapes and dtypes are those of fovea/ops.h: T tokens, N query heads, Hk key heads, L
 * kv_lora_rank, R qk_rope_head_dim, D and Dv widths of keys and values. Whatever is wrong is said
 * before anything is written: fovea_last_error() has the text. No exception leaves a function. */
#ifndef FOVEA_FOVEA_H_
#define FOVEA_FOVEA_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1,   /* A value is wrong; the text names it. */
  FOVEA_UNSUPPORTED = 2,        /* Well formed, but nothing here implements it. */
  FOVEA_CORRUPT_FILE = 3,       /* A file contradicts itself. */
  FOVEA_RESOURCE_EXHAUSTED = 4, /* A capacity does not suffice, or memory ran out. */
  FOVEA_INTERNAL = 5,           /* A fault of this library. */
  FOVEA_DEVICE_FAILED = 6       /* A device refused or failed what it was told. */
} fovea_status;

/* Why the last call of this thread failed; valid until its next one. Never NULL. */
const char* fovea_last_error(void);

/* One of the constants below. An int, so that any other value can be told from them and refused. */
typedef int32_t fovea_dtype;
enum {
  FOVEA_F32,
  FOVEA_F16,
  FOVEA_BF16,
  FOVEA_F8E4M3FN,
  FOVEA_U8,
  FOVEA_I32,
  FOVEA_I64
};

/* Where memory lies: all zeros is the host. */
enum { FOVEA_CPU, FOVEA_CUDA };
typedef struct fovea_device {
  int32_t type; /* FOVEA_CPU or FOVEA_CUDA. */
  int32_t index;
} fovea_device;

#define FOVEA_MAX_RANK 6

/* A strided array in memory of the caller's; strides count elements. Absent: data NULL. */
typedef struct fovea_tensor {
  void* data;
  fovea_device device;
  fovea_dtype dtype;
  int32_t ndim;
  int64_t shape[FOVEA_MAX_RANK];
  int64_t strides[FOVEA_MAX_RANK];
} fovea_tensor;

/* ---------------------------------------------------------------- runtime, caches, plans */

/* Threads, scratch memory and kernels. Used by one thread at a time. */
typedef struct fovea_runtime fovea_runtime;

/* All zeros is the default; fovea/runtime.h says what each means. */
typedef struct fovea_runtime_options {
  const char* backend; /* "auto" (or NULL), "cpu", "reference" or "cuda". */
  const char* isa;     /* As RuntimeOptions::isa of runtime.h; NULL: "auto". */
  int32_t num_threads; /* 0: the processors that this process may use. */
  int32_t batch_invariant;
  int32_t cuda_device;
  void* cuda_stream; /* The cudaStream_t that ops of "cuda" are queued on. */
} fovea_runtime_options;

/* `options` NULL: all zeros. */
fovea_status fovea_runtime_create(const fovea_runtime_options* options, fovea_runtime** runtime);
void fovea_runtime_destroy(fovea_runtime* runtime);

/* Blocks of stored tokens. Slot s is row s % block_size of block s / block_size. */
typedef struct fovea_cache fovea_cache;

/* All in bytes but the counts. */
typedef struct fovea_cache_layout {
  void* base; /* Memory of the caller's, which must outlive the cache; NULL: own, uninitialised. */
  fovea_device device; /* Of base. */
  int64_t num_blocks;
  int64_t block_size;     /* Tokens of a block. */
  int64_t row_stride;     /* From a token to the next; 0: rows are contiguous. */
  int64_t block_stride;   /* From a block to the next; 0: blocks are contiguous. */
  int64_t storage_offset; /* From base to block 0. */
} fovea_cache_layout;

/* Latent rows [kv_c | k_pe] in the format of that name: "bf16", "fp8_e4m3", "int8_per_token" and so
 * on (docs/kv-formats.md). `scale` multiplies what formats with one scale store; else 1. */
fovea_status fovea_latent_cache_create(const char* format, int64_t kv_lora_rank,
                                       int64_t qk_rope_head_dim, float scale,
                                       const fovea_cache_layout* layout, fovea_cache** cache);
/* Keys, or values, of `num_heads` heads. */
fovea_status fovea_heads_cache_create(const char* format, int64_t num_heads, int64_t head_dim,
                                      float scale, const fovea_cache_layout* layout,
                                      fovea_cache** cache);
void fovea_cache_destroy(fovea_cache* cache);

/* Which keys a query sees, as fovea/attention_variant.h says. */
typedef struct fovea_variant {
  int32_t causal;
  int64_t window_left;     /* Negative: all. */
  int64_t attention_chunk; /* 0: all. */
  float soft_cap;          /* 0: scores as they are. */
} fovea_variant;

#define FOVEA_CAUSAL \
  { 1, -1, 0, 0.0f }

/* The lengths of a step, in host memory. */
typedef struct fovea_lengths {
  int64_t requests;
  const int32_t* query_start_loc; /* [requests + 1], from 0: the query tokens of each request. */
  const int32_t* seq_lens;        /* [requests] keys, those of the query tokens included. */
} fovea_lengths;

/* What is decided about a step, once for all layers that see the same keys. Immutable. */
typedef struct fovea_plan fovea_plan;

/* Requests with at most `decode_threshold` query tokens must come first; they are the decodes. */
fovea_status fovea_plan_create(const fovea_runtime* runtime, const fovea_lengths* lengths,
                               const fovea_variant* variant, int32_t decode_threshold,
                               fovea_plan** plan);
void fovea_plan_destroy(fovea_plan* plan);

/* A step with a plan, which then has its lengths and variant; or without: planned inside the call,
 * which allocates. */
typedef struct fovea_step {
  const fovea_plan* plan;
  fovea_lengths lengths; /* Without a plan. */
  fovea_variant variant; /* Without a plan. */
} fovea_step;

/* [requests, width] block ids in host memory; `stride` from a request to the next. */
typedef struct fovea_block_table {
  const int32_t* data;
  int64_t requests;
  int64_t width;
  int64_t stride;
} fovea_block_table;

/* ---------------------------------------------------------------- ops */

typedef struct fovea_mla_decode_params {
  fovea_tensor q_latent;    /* [T, N, L] f32, f16, bf16 or f8e4m3fn */
  fovea_tensor q_pe;        /* [T, N, R] */
  const fovea_cache* cache; /* Latent rows. */
  fovea_block_table block_table;
  fovea_step step; /* The plan's decodes. */
  fovea_tensor out;   /* [T, N, L] */
  fovea_tensor lse;   /* Optional [N, T] f32, natural log. */
  fovea_tensor sinks; /* Optional [N] f32. */
  float sm_scale;
  float q_scale; /* Of f8e4m3fn queries; else 0. */
} fovea_mla_decode_params;
fovea_status fovea_mla_decode(const fovea_runtime* runtime, const fovea_mla_decode_params* params);

typedef struct fovea_attention_decode_params {
  fovea_tensor q;             /* [T, N, D] */
  const fovea_cache* k_cache; /* Rows of Hk heads of D. */
  const fovea_cache* v_cache; /* Rows of Hk heads of Dv. */
  fovea_block_table block_table;
  fovea_step step; /* The plan's decodes. */
  fovea_tensor out;   /* [T, N, Dv] */
  fovea_tensor lse;   /* Optional [N, T] f32. */
  fovea_tensor sinks; /* Optional [N] f32. */
  float sm_scale;
} fovea_attention_decode_params;
fovea_status fovea_attention_decode(const fovea_runtime* runtime,
                                    const fovea_attention_decode_params* params);

/* Keys and values are k and v, or those of the caches, or both: then k and v are the query tokens'
 * own, and those before them are cached. */
typedef struct fovea_attention_prefill_params {
  fovea_tensor q;    /* [Tq, N, D] */
  fovea_tensor k;    /* [Tk, Hk, D - R] */
  fovea_tensor k_pe; /* Optional [Tk, R]. */
  fovea_tensor v;    /* [Tk, Hk, Dv] */
  const fovea_cache* k_cache;
  const fovea_cache* v_cache;
  fovea_block_table block_table;
  fovea_step step;    /* The plan's prefills. */
  fovea_tensor out;   /* [Tq, N, Dv] */
  fovea_tensor lse;   /* Optional [N, Tq] f32. */
  fovea_tensor sinks; /* Optional [N] f32. */
  float sm_scale;
} fovea_attention_prefill_params;
fovea_status fovea_attention_prefill(const fovea_runtime* runtime,
                                     const fovea_attention_prefill_params* params);

/* The attention over both parts' keys; `lse` of the result is optional, so are `sinks` [N] f32. */
typedef struct fovea_merge_state_params {
  fovea_tensor prefix_out; /* [T, N, D] */
  fovea_tensor prefix_lse; /* [N, T] f32 */
  fovea_tensor suffix_out;
  fovea_tensor suffix_lse;
  fovea_tensor out;
  fovea_tensor lse;
  fovea_tensor sinks;
} fovea_merge_state_params;
fovea_status fovea_merge_state(const fovea_runtime* runtime,
                               const fovea_merge_state_params* params);

/* Stores [kv_c [T, L] | k_pe [T, R]] in slots slot_mapping [T] i32 or i64; -1 skips a token. */
fovea_status fovea_kv_append(const fovea_runtime* runtime, const fovea_tensor* kv_c,
                             const fovea_tensor* k_pe, const fovea_tensor* slot_mapping,
                             const fovea_cache* cache);
/* Stores keys k [T, Hk, D] and values v [T, Hk, Dv]. */
fovea_status fovea_gqa_append(const fovea_runtime* runtime, const fovea_tensor* k,
                              const fovea_tensor* v, const fovea_tensor* slot_mapping,
                              const fovea_cache* k_cache, const fovea_cache* v_cache);
/* Copies seq_lens[i] rows of request i, from position starts[i] on, to out [sum(seq_lens), row]. */
fovea_status fovea_kv_gather(const fovea_runtime* runtime, const fovea_cache* cache,
                             const fovea_block_table* block_table, const int32_t* starts,
                             const int32_t* seq_lens, const fovea_tensor* out);

#ifdef __cplusplus
}
#endif

#endif /* FOVEA_FOVEA_H_ */
