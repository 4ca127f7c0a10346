#include "core/float_bits.h"
#include "linear/plain_kernels-inl.h"

namespace fovea {
const PlainKernels kPlainKernelsScalar = kernels_named("scalar");
}
