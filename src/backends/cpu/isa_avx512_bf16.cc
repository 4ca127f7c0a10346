// Every kernel, with internal linkage, for one instruction set. Each part needs those before it.
#define FOVEA_CPU_ISA avx512_bf16
#define FOVEA_CPU_PAIRS &kPairKernels

// clang-format off
#include "backends/cpu/kernels.h"
#include "backends/cpu/simd/avx512_bf16.h"
#include "backends/cpu/simd/exp-inl.h"
#include "backends/cpu/simd/partial-inl.h"
#include "backends/cpu/kernels/softmax-inl.h"
#include "backends/cpu/kernels/attend-inl.h"
#include "backends/cpu/kernels/in_place-inl.h"
#include "backends/cpu/kernels/add_words-inl.h"
#include "backends/cpu/kernels/score_digits-inl.h"
#include "backends/cpu/kernels/add_int8-inl.h"
#include "backends/cpu/kernels/attend_pairs-inl.h"
#include "backends/cpu/kernels/peak-inl.h"
#include "backends/cpu/kernels/rows-inl.h"
#include "backends/cpu/kernels/table-inl.h"
// clang-format on
