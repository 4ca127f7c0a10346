// RMSNorm and rotation, row by row.
#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

class AddResidual : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(AddResidual);

TEST_P(AddResidual, MatchesFloat64) {
  for (std::int64_t width : {1, 64, 100, 1536}) {
    for (std::int64_t tokens : {0, 1, 33}) {
      const PaddedTensor x(dtype(), {tokens, width}, 9), y(dtype(), {tokens, width});
      fill_normal(x, 1, 3);
      fill_normal(y, 2);
      const std::vector<double> before = to_doubles(x), added = to_doubles(y);
      for (float scale : {1.f, -0.3f}) {
        std::vector<double> expected = before;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          expected[i] += static_cast<double>(scale) * added[i];
        }
        assign(x, before);
        add_residual(ctx(), {x, y, scale});
        EXPECT_TRUE(values_close(expected, x, 1e-6, unit_roundoff(dtype()) + 0x1p-22));
        EXPECT_TRUE(x.padding_untouched());
      }
    }
  }
}

class RmsNorm : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(RmsNorm);

TEST_P(RmsNorm, MatchesFloat64) {
  for (std::int64_t width : {1, 7, 64, 100, 512, 1536, 3072, 7175}) {
    for (std::int64_t tokens : {0, 1, 5, 33}) {
      const PaddedTensor x(dtype(), {tokens, width}), weight(dtype(), {width});
      const PaddedTensor out(dtype(), {tokens, width}, 9);
      fill_normal(x, 1, 3);
      fill_uniform(weight, 2, 0.5, 1.5);
      rms_norm(ctx(), {x, weight, out, 1e-5f});
      EXPECT_TRUE(rows_close(
          oracle::rms_norm(to_doubles(x), to_doubles(weight), static_cast<double>(1e-5f)), out,
          row_tolerance(dtype())));
      EXPECT_TRUE(out.padding_untouched());
    }
  }
}

TEST_P(RmsNorm, WorksInPlaceOnASliceOfAProjection) {
  const PaddedTensor projection(dtype(), {6, 80});
  fill_normal(projection, 1);
  const Tensor before = Tensor::empty(dtype(), {6, 16});
  copy(projection.view().slice(1, 64, 80), before);
  const Tensor weight = Tensor::empty(dtype(), {64});
  fill_normal(weight, 2);
  const TensorView x = projection.view().slice(1, 0, 64);
  const std::vector<double> expected =
      oracle::rms_norm(to_doubles(x), to_doubles(weight), static_cast<double>(1e-6f));
  rms_norm(ctx(), {x, weight, x});
  EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
  EXPECT_TRUE(bits_equal(before, projection.view().slice(1, 64, 80)));
  EXPECT_TRUE(projection.padding_untouched());
}

TEST_P(RmsNorm, TakesAStridedWeightAndOneOfAnotherDType) {
  const Tensor x = Tensor::empty(dtype(), {3, 32}), out = Tensor::empty(dtype(), {3, 32});
  const Tensor weights = Tensor::empty(DType::f32, {32, 2});
  fill_normal(x, 1);
  fill_normal(weights, 2);
  const TensorView weight = weights.view().select(1, 1);
  rms_norm(ctx(), {x, weight, out});
  EXPECT_TRUE(
      rows_close(oracle::rms_norm(to_doubles(x), to_doubles(weight), static_cast<double>(1e-6f)),
                 out, row_tolerance(dtype())));
}

TEST_P(RmsNorm, TinyAndHugeRowsKeepTheirPrecision) {
  const Tensor x = Tensor::zeros(dtype(), {4, 64}), out = Tensor::empty(dtype(), {4, 64});
  const Tensor weight = tensor_from(dtype(), {64}, std::vector<double>(64, 1.0));
  fill_normal(x.view().slice(0, 0, 1), 1, 1e-4);
  fill_normal(x.view().slice(0, 1, 2), 2, 1e4);
  fill_normal(x.view().slice(0, 3, 4), 3, 1);
  rms_norm(ctx(), {x, weight, out, 1e-12f});  // Row 2 is zero.
  EXPECT_TRUE(
      rows_close(oracle::rms_norm(to_doubles(x), to_doubles(weight), static_cast<double>(1e-12f)),
                 out, row_tolerance(dtype())));
}

TEST_P(RmsNorm, SquaresMayLeaveTheRangeOfFloat32) {
  const bool narrow_range = dtype() == DType::f16;
  const Tensor x = Tensor::empty(dtype(), {2, 64}), out = Tensor::empty(dtype(), {2, 64});
  const Tensor weight = tensor_from(dtype(), {64}, std::vector<double>(64, 1.0));
  fill_uniform(x.view().slice(0, 0, 1), 1, 0, narrow_range ? 6e4 : 1e30);
  fill_uniform(x.view().slice(0, 1, 2), 2, 0, narrow_range ? 1e-3 : 1e-25);
  rms_norm(ctx(), {x, weight, out, 0.f});
  EXPECT_TRUE(rows_close(oracle::rms_norm(to_doubles(x), to_doubles(weight), 0), out,
                         row_tolerance(dtype())));
}

class Rope : public BackendTest {
 protected:
  static constexpr std::int64_t kMaxPosition = 50;

  /// Cosines and sines that belong to no angle: whatever reads them must read the right ones.
  static Tensor random_table(std::int64_t dim) {
    Tensor table = Tensor::empty(DType::f32, {kMaxPosition, dim});
    fill_uniform(table, 9, -1, 1);
    return table;
  }

  static std::vector<double> rotated(const TensorView& x,
                                     const std::vector<std::int64_t>& positions,
                                     const TensorView& table, RopePairing pairing) {
    std::vector<double> values = to_doubles(x);
    const std::vector<double> cos_sin = to_doubles(table);
    const auto heads = static_cast<std::size_t>(x.shape[1]),
               dim = static_cast<std::size_t>(x.shape[2]);
    for (std::size_t t = 0; t < positions.size(); ++t) {
      const double* angles = cos_sin.data() + static_cast<std::size_t>(positions[t]) * dim;
      for (std::size_t n = 0; n < heads; ++n) {
        double* row = values.data() + (t * heads + n) * dim;
        for (std::size_t i = 0; i < dim / 2; ++i) {
          const bool neox = pairing == RopePairing::neox;
          double& a = row[neox ? i : 2 * i];
          double& b = row[neox ? i + dim / 2 : 2 * i + 1];
          const double cos = angles[i], sin = angles[dim / 2 + i];
          const double turned = a * cos - b * sin;
          b = b * cos + a * sin;
          a = turned;
        }
      }
    }
    return values;
  }
};
FOVEA_FOR_EACH_BACKEND(Rope);

TEST_P(Rope, TurnsPairsOfBothKinds) {  // F279, B153, B159
  const std::vector<std::int64_t> positions{49, 0, 7, 7, 31};
  const Tensor index = tensor_from(DType::i64, {5}, std::vector<double>{49, 0, 7, 7, 31});
  for (RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (std::int64_t dim : {2, 8, 32, 64, 6}) {
      for (std::int64_t heads : {1, 3, 16}) {
        const Tensor table = random_table(dim);
        const PaddedTensor x(dtype(), {5, heads, dim});
        fill_normal(x, 1);
        const std::vector<double> expected = rotated(x, positions, table, pairing);
        rope(ctx(), {x, {index, table, pairing, {}}});
        EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
        EXPECT_TRUE(x.padding_untouched());
      }
    }
  }
}

TEST_P(Rope, MatchesTheOraclesAngles) {
  for (bool interleaved : {false, true}) {
    const oracle::Rotary rotary = oracle::rotary(16, 10000, interleaved);
    std::vector<double> table;
    for (std::int64_t p = 0; p < kMaxPosition; ++p) {
      for (double f : rotary.inv_freq) table.push_back(std::cos(static_cast<double>(p) * f));
      for (double f : rotary.inv_freq) table.push_back(std::sin(static_cast<double>(p) * f));
    }
    const Tensor cos_sin = tensor_from(DType::f32, {kMaxPosition, 16}, table);
    const Tensor x = Tensor::empty(dtype(), {3, 2, 16});
    fill_normal(x, 4);
    std::vector<double> expected = to_doubles(x);
    const std::vector<std::int64_t> positions{0, 1, 44};
    oracle::rotate(expected, positions, 2, rotary);
    rope(ctx(), {x,
                 {TensorView::of(positions.data(), {3}),
                  cos_sin,
                  interleaved ? RopePairing::interleaved : RopePairing::neox,
                  {}}});
    EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
  }
}

TEST_P(Rope, TurnsAViewIntoAProjectionInPlace) {  // F275, F303, B026, B166
  const Tensor q = Tensor::empty(dtype(), {4, 3, 192});
  fill_normal(q, 1);
  const Tensor nope = Tensor::empty(dtype(), {4, 3, 128});
  copy(q.view().slice(2, 0, 128), nope);
  const Tensor table = random_table(64);
  const TensorView q_pe = q.view().slice(2, 128, 192);
  const std::vector<std::int64_t> positions{3, 1, 4, 15};
  const std::vector<double> expected = rotated(q_pe, positions, table, RopePairing::interleaved);
  rope(ctx(), {q_pe, {TensorView::of(positions.data(), {4}), table, RopePairing::interleaved, {}}});
  EXPECT_TRUE(rows_close(expected, q_pe, row_tolerance(dtype())));
  EXPECT_TRUE(bits_equal(nope, q.view().slice(2, 0, 128)));
}

TEST_P(Rope, TakesKeysAsOneHeadAndAnyStrides) {  // F276
  const Tensor latent = Tensor::empty(dtype(), {5, 40});
  fill_normal(latent, 1);
  const TensorView k_pe = latent.view().slice(1, 32, 40).split(1, 1, 8);
  const Tensor table = random_table(8);
  const std::vector<std::int64_t> positions{1, 2, 3, 4, 5};
  const std::vector<double> expected = rotated(k_pe, positions, table, RopePairing::neox);
  rope(ctx(), {k_pe, {TensorView::of(positions.data(), {5}), table, RopePairing::neox, {}}});
  EXPECT_TRUE(rows_close(expected, k_pe, row_tolerance(dtype())));

  const Tensor scattered = Tensor::empty(dtype(), {8, 5, 2});
  const TensorView x = scattered.view().transpose(0, 1).transpose(1, 2);
  fill_normal(x, 3);
  const std::vector<double> turned = rotated(x, positions, table, RopePairing::neox);
  rope(ctx(), {x, {TensorView::of(positions.data(), {5}), table, RopePairing::neox, {}}});
  EXPECT_TRUE(rows_close(turned, x, row_tolerance(dtype())));
}

TEST_P(Rope, PositionsAreOneRowOrNoneAndOfEitherWidth) {  // F316
  const Tensor table = random_table(8);
  const Tensor x = Tensor::empty(dtype(), {3, 2, 8});
  const std::vector<std::int64_t> positions{9, 11, 2};
  std::vector<double> expected;
  for (DType index_dtype : {DType::i32, DType::i64}) {
    const Tensor wide = Tensor::empty(index_dtype, {3, 2});
    assign(wide.view(), std::vector<double>{9, 77, 11, 77, 2, 77});
    const TensorView strided = wide.view().select(1, 0);
    for (const TensorView& view : {strided, strided.split(0, 1, 3)}) {
      fill_normal(x, 1);
      expected = rotated(x, positions, table, RopePairing::neox);
      rope(ctx(), {x, {view, table, RopePairing::neox, {}}});
      EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
    }
  }
}

/// Pairs of each axis by the definitions of Qwen2-VL (in sections) and Qwen3-VL (interleaved).
TEST_P(Rope, PairsTurnByTheirAxis) {  // B161, B162, B163
  struct Case {
    MropeSections sections;
    std::vector<std::size_t> axis_of_pair;
  };
  const Case cases[] = {
      {{.pairs = {2, 3, 3}}, {0, 0, 1, 1, 1, 2, 2, 2}},
      {{.pairs = {0, 8, 0}}, {1, 1, 1, 1, 1, 1, 1, 1}},
      {{.pairs = {4, 2, 2}, .interleaved = true}, {0, 1, 2, 0, 1, 2, 0, 0}},
      {{.pairs = {3, 3, 2}, .interleaved = true}, {0, 1, 2, 0, 1, 2, 0, 1}},
  };
  const std::vector<std::vector<std::int64_t>> positions{{1, 9, 40}, {7, 0, 49}, {22, 3, 4}};
  const Tensor table = random_table(16);
  const std::vector<double> angles = to_doubles(table);
  for (const auto& [sections, axis_of_pair] : cases) {
    for (RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
      for (DType index_dtype : {DType::i32, DType::i64}) {
        const PaddedTensor x(dtype(), {3, 2, 16}), index(index_dtype, {3, 3});
        fill_normal(x, 1);
        std::vector<double> flat;
        for (const auto& row : positions) flat.insert(flat.end(), row.begin(), row.end());
        assign(index, flat);
        // A table of its own per token: each pair's angle from the row of its axis' position.
        std::vector<double> mixed(3 * 16);
        for (std::size_t t = 0; t < 3; ++t) {
          for (std::size_t i = 0; i < 8; ++i) {
            const auto row = static_cast<std::size_t>(positions[axis_of_pair[i]][t]) * 16;
            mixed[t * 16 + i] = angles[row + i];
            mixed[t * 16 + 8 + i] = angles[row + 8 + i];
          }
        }
        const Tensor own = tensor_from(DType::f32, {3, 16}, mixed);
        const std::vector<double> expected = rotated(x, {0, 1, 2}, own, pairing);
        rope(ctx(), {x, {index, table, pairing, sections}});
        EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
        EXPECT_TRUE(x.padding_untouched());
      }
    }
  }
}

TEST_P(Rope, EqualPositionsOnAllAxesAreOneAxis) {
  const Tensor table = random_table(16);
  const std::vector<std::int64_t> same{4, 30, 4, 30, 4, 30};
  for (bool interleaved : {false, true}) {
    const Tensor one = Tensor::empty(dtype(), {2, 3, 16}),
                 three = Tensor::empty(dtype(), {2, 3, 16});
    fill_normal(one, 1);
    fill_normal(three, 1);
    rope(ctx(), {one, {TensorView::of(same.data(), {2}), table, RopePairing::neox, {}}});
    rope(ctx(), {three,
                 {TensorView::of(same.data(), {3, 2}),
                  table,
                  RopePairing::neox,
                  {.pairs = {4, 2, 2}, .interleaved = interleaved}}});
    EXPECT_TRUE(bits_equal(one, three));
  }
}

TEST_P(Rope, TurnsTheFirstChannelsOfAHead) {  // B155
  const Tensor q = Tensor::empty(dtype(), {4, 16, 128}), rest = Tensor::empty(dtype(), {4, 16, 64});
  fill_normal(q, 1);
  copy(q.view().slice(2, 64, 128), rest);
  const Tensor table = random_table(64);
  const TensorView x = q.view().slice(2, 0, 64);
  const std::vector<std::int64_t> positions{3, 1, 4, 15};
  const std::vector<double> expected = rotated(x, positions, table, RopePairing::neox);
  rope(ctx(), {x, {TensorView::of(positions.data(), {4}), table, RopePairing::neox, {}}});
  EXPECT_TRUE(rows_close(expected, x, row_tolerance(dtype())));
  EXPECT_TRUE(bits_equal(rest, q.view().slice(2, 64, 128)));
}

}  // namespace
}  // namespace fovea::test
