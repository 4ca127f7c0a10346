#include "linear/plain_kernels-inl.h"

namespace fovea {
const PlainKernels kPlainKernelsAvx2 = kernels_named("avx2");
}
