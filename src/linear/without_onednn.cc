// Stands in for onednn.cc and openmp_thread_pool.cc where FOVEA_ONEDNN is OFF.
#include "fovea/thread_pool.h"
#include "linear/product.h"

namespace fovea {

std::unique_ptr<DenseProduct> make_onednn_product(const ProductShape&) { return nullptr; }

std::unique_ptr<DenseProduct> make_onednn_product_where_fastest(const ProductShape&) {
  return nullptr;
}

std::unique_ptr<ThreadPool> make_openmp_thread_pool(int num_threads) {
  return make_std_thread_pool(num_threads);
}

}  // namespace fovea
