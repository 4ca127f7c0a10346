#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/mla.h"
#include "layers/absorbed_weights.h"
#include "support/compare.h"

namespace fovea {
namespace {

MlaDims small_dims() {
  MlaDims dims;
  dims.hidden_size = 5;
  dims.num_heads = 2;
  dims.kv_lora_rank = 3;
  dims.qk_nope_head_dim = 2;
  dims.qk_rope_head_dim = 2;
  dims.v_head_dim = 1;
  return dims;
}

std::string error_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(MlaDims, ScaleComesFromTheHeadWidth) {
  MlaDims dims = small_dims();
  dims.qk_nope_head_dim = 128;
  dims.qk_rope_head_dim = 64;
  dims.kv_lora_rank = 512;
  EXPECT_FLOAT_EQ(dims.validated().sm_scale, static_cast<float>(1 / std::sqrt(192.0)));
  EXPECT_EQ(dims.validated().qk_head_dim(), 192);
  EXPECT_EQ(dims.validated().latent_dim(), 576);
  dims.sm_scale = 0.114721f;  // With YaRN's mscale^2.
  EXPECT_EQ(dims.validated().sm_scale, 0.114721f);
}

TEST(MlaDims, ErrorsNameTheField) {
  MlaDims dims = small_dims();
  dims.v_head_dim = 0;
  EXPECT_NE(error_of([&] { dims.validated(); }).find("dims.v_head_dim is 0"), std::string::npos);
  dims = small_dims();
  dims.q_lora_rank = -1;
  EXPECT_NE(error_of([&] { dims.validated(); }).find("dims.q_lora_rank is -1"), std::string::npos);
  dims = small_dims();
  dims.qk_rope_head_dim = 3;
  EXPECT_NE(error_of([&] { dims.validated(); }).find("must be even"), std::string::npos);
  dims = small_dims();
  dims.sm_scale = -1;
  EXPECT_NE(error_of([&] { dims.validated(); }).find("dims.sm_scale is -1"), std::string::npos);
}

/// kv_b_proj whose element says head, part (0 key, 1 value), channel and latent channel.
double code(std::int64_t head, int part, std::int64_t channel, std::int64_t latent) {
  return static_cast<double>(1000 * head + 100 * part + 10 * channel + latent);
}

TEST(MlaUpProjections, BothColumnOrdersOfKvB) {
  const MlaDims dims = small_dims();  // N 2, P 2, V 1, L 3
  std::vector<double> per_head, grouped;
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t row = 0; row < 3; ++row) {
      for (std::int64_t l = 0; l < 3; ++l) {
        per_head.push_back(row < 2 ? code(n, 0, row, l) : code(n, 1, 0, l));
      }
    }
  }
  for (int part : {0, 1}) {
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t row = 0; row < (part == 0 ? 2 : 1); ++row) {
        for (std::int64_t l = 0; l < 3; ++l) grouped.push_back(code(n, part, row, l));
      }
    }
  }
  for (KvBOrder order : {KvBOrder::per_head, KvBOrder::grouped}) {
    const Tensor kv_b =
        test::tensor_from(DType::f32, {6, 3}, order == KvBOrder::per_head ? per_head : grouped);
    const MlaUpProjections up = mla_up_projections(dims, kv_b, order);
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t l = 0; l < 3; ++l) {
        for (std::int64_t p = 0; p < 2; ++p) {
          EXPECT_EQ(*up.w_uk.ptr<float>({n, p, l}), code(n, 0, p, l));
        }
        EXPECT_EQ(*up.w_uv.ptr<float>({n, l, 0}), code(n, 1, 0, l));
      }
    }
    EXPECT_EQ(up.w_uk.shape[1], 2);
    EXPECT_EQ(up.w_uv.shape[2], 1);
  }
}

TEST(MlaUpProjections, ErrorPrintsAllNumbers) {
  const Tensor kv_b = Tensor::zeros(DType::bf16, {7, 3});
  const std::string text =
      error_of([&] { mla_up_projections(small_dims(), kv_b, KvBOrder::per_head); });
  EXPECT_NE(text.find("kv_b_proj is bf16[7, 3]"), std::string::npos) << text;
  EXPECT_NE(text.find("[2 * (2 + 1), 3] = [6, 3]"), std::string::npos) << text;
}

TEST(MlaUpProjections, LatentRankEqualToTheOutputs) {
  // A square kv_b_proj must not be taken for its transpose.
  MlaDims dims = small_dims();
  dims.kv_lora_rank = 6;
  Tensor kv_b = Tensor::empty(DType::f32, {6, 6});
  test::fill_normal(kv_b, 1);
  const MlaUpProjections up = mla_up_projections(dims, kv_b, KvBOrder::per_head);
  EXPECT_EQ(*up.w_uk.ptr<float>({1, 0, 4}), *kv_b.ptr<float>({3, 4}));
  EXPECT_EQ(*up.w_uv.ptr<float>({0, 4, 0}), *kv_b.ptr<float>({2, 4}));
}

TEST(AbsorbedWeights, AreProductsOfTheirParts) {
  const MlaDims dims = small_dims();
  Tensor q_b = Tensor::empty(DType::f32, {8, 5}), kv_b = Tensor::empty(DType::f32, {6, 3}),
         o_proj = Tensor::empty(DType::f32, {5, 2});
  test::fill_normal(q_b, 1);
  test::fill_normal(kv_b, 2);
  test::fill_normal(o_proj, 3);
  const MlaUpProjections up = mla_up_projections(dims, kv_b, KvBOrder::per_head);
  MlaWeights weights;
  weights.q_b_proj = q_b;
  weights.kv_b_proj = kv_b;
  weights.o_proj = o_proj;
  const AbsorbedWeights absorbed = absorb(dims, weights, DType::f32, false);
  const TensorView &w_q_uk = absorbed.w_q_uk.projection.weight,
                   &w_qr = absorbed.w_qr.projection.weight,
                   &w_uv_o = absorbed.w_uv_o.projection.weight;
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t x = 0; x < 5; ++x) {
      for (std::int64_t l = 0; l < 3; ++l) {
        double query = 0;
        for (std::int64_t p = 0; p < 2; ++p) {
          query += *q_b.ptr<float>({n * 4 + p, x}) * *up.w_uk.ptr<float>({n, p, l});
        }
        EXPECT_NEAR(*w_q_uk.ptr<float>({n * 3 + l, x}), query, 1e-6);
        const double out = *o_proj.ptr<float>({x, n}) * *up.w_uv.ptr<float>({n, l, 0});
        EXPECT_NEAR(*w_uv_o.ptr<float>({x, n * 3 + l}), out, 1e-6);
      }
      for (std::int64_t r = 0; r < 2; ++r) {
        EXPECT_EQ(*w_qr.ptr<float>({n * 2 + r, x}), *q_b.ptr<float>({n * 4 + 2 + r, x}));
      }
    }
  }
}

}  // namespace
}  // namespace fovea
