// Products on a GPU: cuBLASLt multiplies, quantised codes are decoded before; few tokens with FP8
// codes are few_rows.cu's.
#include <algorithm>
#include <cstring>
#include <utility>

#include "linear/cublaslt_library.h"
#include "linear/product.h"
#include "linear/product_kernels.h"

namespace fovea {
namespace {

using cuda::CublasLt;

/// What NVIDIA asks for on its newest GPUs; older ones need less.
constexpr std::int64_t kScratchBytes = 32 << 20;
/// Of the scratch. The documentation asks for 16, the library refuses 64.
constexpr std::int64_t kScratchAlignment = 256;
constexpr std::int64_t kTakenBytes = kScratchBytes + kScratchAlignment;

void* take_scratch(WorkspaceScope& scope) {
  constexpr std::uintptr_t kMask = kScratchAlignment - 1;
  const auto taken = reinterpret_cast<std::uintptr_t>(scope.take_bytes(kTakenBytes));
  return reinterpret_cast<void*>((taken + kMask) & ~kMask);
}

cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::f16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// The power of two that an address is a multiple of, as far as cuBLASLt asks.
std::uint32_t alignment_of(const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address) | 256;
  return static_cast<std::uint32_t>(value & ~(value - 1));
}

/// Throws unless a GPU's kernels can address rows of the view and tell them apart.
void check_rows_on_device(const char* name, const TensorView& rows, const Device& device) {
  if (rows.device != device) {
    cudaPointerAttributes attributes;
    const bool addressed = cudaPointerGetAttributes(&attributes, rows.data) == cudaSuccess &&
                           attributes.devicePointer == rows.data;
    cudaGetLastError();  // Not an error of the next launch.
    FOVEA_CHECK(addressed, unsupported,
                "{} is in memory that {} cannot address; it must be in its own, pinned or managed",
                name, to_string(device));
  }
  FOVEA_CHECK(rows.shape[0] == 1 || rows.strides[0] >= rows.shape[2], unsupported,
              "{} is {}, but on a GPU its rows must be at least {} elements apart", name,
              to_string(rows), rows.shape[2]);
}

/// out[t, n] = x[t, n] W[n] + bias, W[n] stored as [M, K]. In the column-major words of the
/// library: D = A^T B with A = W[n], [K, M]; B = x[n], [K, T]; D = out[n], [M, T].
class Matmul {
 public:
  Matmul(const ProductShape& shape, const MemorySource& memory)
      : lt_(CublasLt::get()), handle_(lt_.handle(memory.device)), shape_(shape), memory_(memory) {
    lt_.check(lt_.init_desc(&desc_, sizeof desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescInit");
    const std::int32_t transposed = CUBLAS_OP_T;
    lt_.check(lt_.set_desc(&desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
              "cublasLtMatmulDescSetAttribute");
    if (shape.has_bias) bias_ = Tensor::empty(shape.dtype, {shape.columns}, memory);
  }

  const MemorySource& memory() const { return memory_; }
  const Tensor& bias() const { return bias_; }
  std::int64_t bias_bytes() const { return bias_.nbytes(); }
  void load_bias(const TensorView& bias) const {
    if (bias_) bias_.assign(bias);
  }

  /// Scratch of take_scratch().
  void run(const ExecutionContext& ctx, const void* weight, const TensorView& x,
           const TensorView& out, void* scratch) const {
    const std::int64_t K = shape_.depth, M = shape_.columns, T = x.shape[0];
    const cuda::CurrentDevice current(memory_.device);
    cublasLtMatrixLayoutOpaque_t a, b, d;
    init_layout(a, K, M, K, M * K);
    init_layout(b, K, T, T == 1 ? K : x.strides[0], x.strides[1]);
    init_layout(d, M, T, T == 1 ? M : out.strides[0], out.strides[1]);
    const cublasLtMatmulAlgo_t algorithm = choose(a, b, d, weight, x.data, out.data);
    // The library's own bias is added to a rounded sum by some algorithms; what the output held is
    // added before the one rounding by all.
    if (bias_) cuda::fill_rows(bias_, out.select(1, 0), cuda::stream_of(ctx));
    const float one = 1.f, beta = bias_ ? 1.f : 0.f;
    lt_.check(lt_.matmul(handle_, &desc_, &one, weight, &a, x.data, &b, &beta, out.data, &d,
                         out.data, &d, &algorithm, scratch, kScratchBytes, cuda::stream_of(ctx)),
              "cublasLtMatmul");
  }

 private:
  void init_layout(cublasLtMatrixLayoutOpaque_t& layout, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride, std::int64_t head_stride) const {
    lt_.check(lt_.init_layout(&layout, sizeof layout, cuda_type(shape_.dtype),
                              static_cast<std::uint64_t>(rows),
                              static_cast<std::uint64_t>(columns), stride),
              "cublasLtMatrixLayoutInit");
    if (shape_.heads == 1) return;
    const auto heads = static_cast<std::int32_t>(shape_.heads);
    lt_.check(lt_.set_layout(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &heads, sizeof heads),
              "batch count");
    lt_.check(lt_.set_layout(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &head_stride,
                             sizeof head_stride),
              "batch stride");
  }

  /// The library's first choice. It keeps what it answered, so that asking in every call costs
  /// little, and needs no table of ours that calls would share.
  cublasLtMatmulAlgo_t choose(cublasLtMatrixLayoutOpaque_t& a, cublasLtMatrixLayoutOpaque_t& b,
                              cublasLtMatrixLayoutOpaque_t& d, const void* weight, const void* x,
                              const void* out) const {
    cublasLtMatmulPreferenceOpaque_t preference;
    lt_.check(lt_.init_preference(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      lt_.check(lt_.set_preference(&preference, attribute, &value, sizeof value),
                "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kScratchBytes));
    // Sums of parts stay f32: results are rounded once.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(weight));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(x));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(out));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(out));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    lt_.check(lt_.heuristic(handle_, &desc_, &a, &b, &d, &d, &preference, 1, &result, &found),
              "cublasLtMatmulAlgoGetHeuristic");
    FOVEA_CHECK(found == 1, unsupported, "cuBLASLt has no algorithm for a product of {} x {} in {}",
                shape_.depth, shape_.columns, name_of(shape_.dtype));
    return result.algo;
  }

  const CublasLt& lt_;
  cublasLtHandle_t handle_;
  ProductShape shape_;
  MemorySource memory_;
  Tensor bias_;  ///< [M]
  mutable cublasLtMatmulDescOpaque_t desc_;  ///< Calls take it without const, and only read it.
};

class CublasLtProduct final : public DenseProduct {
 public:
  CublasLtProduct(const ProductShape& shape, const MemorySource& memory)
      : DenseProduct(shape),
        weight_(Tensor::empty(shape.dtype, {shape.heads, shape.columns, shape.depth}, memory)),
        matmul_(shape, memory) {}

  std::string_view name() const override { return "cublaslt"; }
  Device device() const override { return matmul_.memory().device; }
  std::int64_t weight_bytes() const override { return weight_.nbytes() + matmul_.bias_bytes(); }
  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    return tokens == 0 ? 0 : Workspace::rounded(kTakenBytes);
  }
  void load(const TensorView& weight, const TensorView& bias) override {
    weight_.assign(weight.transpose(1, 2));  // [N, K, M] -> [N, M, K]
    matmul_.load_bias(bias);
  }
  void run(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const override {
    check_rows_on_device("x", x, device());
    check_rows_on_device("out", out, device());
    WorkspaceScope scope(*ctx.workspace);
    matmul_.run(ctx, weight_.view().data, x, out, take_scratch(scope));
  }

 private:
  Tensor weight_;  ///< [N, M, K]
  Matmul matmul_;
};

/// Codes stay codes. A call that multiply_few_rows does not take decodes them into the workspace,
/// rounded once to the dtype.
class CublasLtQuantizedProduct final : public QuantizedProduct {
 public:
  CublasLtQuantizedProduct(const ProductShape& shape, const WeightGroups& groups,
                           const MemorySource& memory)
      : QuantizedProduct(shape),
        groups_({.out = group_extent(groups.out, shape.columns),
                 .in = group_extent(groups.in, shape.depth)}),
        codes_(Tensor::empty(DType::u8, {shape.heads, shape.columns, row_bytes()}, memory)),
        scales_(Tensor::empty(DType::f32,
                              {shape.heads, num_groups(shape.columns, groups.out),
                               num_groups(shape.depth, groups.in)},
                              memory)),
        matmul_(shape, memory) {}

  std::string_view name() const override {
    return shape().is_mxfp4 ? "cublaslt/mxfp4" : "cublaslt/fp8";
  }
  Device device() const override { return matmul_.memory().device; }
  std::int64_t weight_bytes() const override {
    return codes_.nbytes() + scales_.nbytes() + matmul_.bias_bytes();
  }
  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    if (tokens == 0) return 0;
    const ProductShape& s = shape();
    std::int64_t bytes = 0;
    if (s.quantizes_x) bytes += Workspace::rounded(bytes_of(s.dtype, tokens * s.heads * s.depth));
    if (cuda::multiplies_few_rows(codes(), s.dtype, tokens)) return bytes;
    return bytes + Workspace::rounded(kTakenBytes) +
           Workspace::rounded(bytes_of(s.dtype, s.heads * s.columns * s.depth));
  }
  void load(std::span<const QuantizedWeight> heads, const TensorView& bias) override;
  void run(const ExecutionContext& ctx, const TensorView& x, const TensorView& out) const override;

 private:
  std::int64_t row_bytes() const { return shape().is_mxfp4 ? shape().depth / 2 : shape().depth; }
  cuda::DeviceCodes codes() const {
    return {.codes = codes_, .scales = scales_, .groups = groups_, .is_mxfp4 = shape().is_mxfp4};
  }

  WeightGroups groups_;  ///< Extents: no 0.
  Tensor codes_;         ///< u8 [N, M, K] or, two in a byte, [N, M, K / 2]
  Tensor scales_;        ///< f32 [N, groups of M, groups of K]
  Matmul matmul_;
};

void CublasLtQuantizedProduct::load(std::span<const QuantizedWeight> heads,
                                    const TensorView& bias) {
  const std::int64_t columns = shape().columns, bytes = row_bytes();
  const std::int64_t rows = scales_.view().shape[1], groups = scales_.view().shape[2];
  const Tensor codes = Tensor::empty(DType::u8, {shape().heads, columns, bytes});
  const Tensor scales = Tensor::empty(DType::f32, {shape().heads, rows, groups});
  for (std::size_t n = 0; n < heads.size(); ++n) {
    const auto head = static_cast<std::int64_t>(n);
    for (std::int64_t m = 0; m < columns; ++m) {
      std::memcpy(codes.ptr<std::uint8_t>({head, m}), heads[n].codes.ptr<std::uint8_t>({m, 0}),
                  static_cast<std::size_t>(bytes));
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < groups; ++j) {
        *scales.ptr<float>({head, i, j}) = scale_at(heads[n].scale, i, j);
      }
    }
  }
  codes_.assign(codes);
  scales_.assign(scales);
  matmul_.load_bias(bias);
}

void CublasLtQuantizedProduct::run(const ExecutionContext& ctx, const TensorView& x,
                                   const TensorView& out) const {
  check_rows_on_device("x", x, device());
  check_rows_on_device("out", out, device());
  const ProductShape& s = shape();
  const cuda::CurrentDevice current(device());
  const cudaStream_t stream = cuda::stream_of(ctx);
  WorkspaceScope scope(*ctx.workspace);
  TensorView rows = x;
  if (s.quantizes_x) {
    rows = scope.take(s.dtype, {x.shape[0], s.heads, s.depth});
    cuda::round_to_fp8(x, groups_.in, rows, stream);
  }
  if (cuda::multiplies_few_rows(codes(), s.dtype, x.shape[0])) {
    cuda::multiply_few_rows(codes(), rows, matmul_.bias(), out, stream);
    return;
  }
  const TensorView weight = scope.take(s.dtype, {s.heads, s.columns, s.depth});
  cuda::decode_codes(codes(), weight, stream);
  matmul_.run(ctx, weight.data, rows, out, take_scratch(scope));
}

}  // namespace

std::unique_ptr<DenseProduct> make_cublaslt_product(const ProductShape& shape,
                                                    const MemorySource& memory) {
  return std::make_unique<CublasLtProduct>(shape, memory);
}

std::unique_ptr<QuantizedProduct> make_cublaslt_quantized_product(const ProductShape& shape,
                                                                  const WeightGroups& groups,
                                                                  const MemorySource& memory) {
  return std::make_unique<CublasLtQuantizedProduct>(shape, groups, memory);
}

}  // namespace fovea
