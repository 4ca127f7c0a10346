// Stands in for cublaslt.cc in builds without CUDA or without cuBLASLt's header.
#include "core/check.h"
#include "linear/lora.h"
#include "linear/product.h"

namespace fovea {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorCode::unsupported,
       "weights are to lie on a GPU, but this build has no cuBLASLt: configure with "
       "-DFOVEA_CUDA=ON where cublasLt.h is found");
}

}  // namespace

std::unique_ptr<DenseProduct> make_cublaslt_product(const ProductShape&, const MemorySource&) {
  refuse();
}

std::unique_ptr<QuantizedProduct> make_cublaslt_quantized_product(const ProductShape&,
                                                                  const WeightGroups&,
                                                                  const MemorySource&) {
  refuse();
}

void add_low_rank(const ExecutionContext&, const LoraOnDevice&, const TensorView&,
                  const TensorView&, const TensorView&) {
  refuse();
}

}  // namespace fovea
