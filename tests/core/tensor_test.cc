#include "fovea/tensor.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "fovea/error.h"
#include "support/compare.h"

namespace fovea {
namespace {

using test::to_doubles;
using Doubles = std::vector<double>;

Doubles count_up(std::int64_t n) {
  Doubles values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<double>(i));
  return values;
}

/// 0, 1, 2, ... in row-major order.
Tensor iota(DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor tensor = Tensor::empty(dtype, shape);
  test::assign(tensor, count_up(tensor.view().numel()));
  return tensor;
}

TEST(TensorViewTest, SliceSelectSplitFuseTransposeAddressTheRightElements) {
  const Tensor tensor = iota(DType::i32, {2, 3, 4});
  const TensorView& view = tensor;
  EXPECT_EQ(to_doubles(view.slice(2, 1, 3)), (Doubles{1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 21, 22}));
  EXPECT_EQ(to_doubles(view.select(1, 2)), (Doubles{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(view.select(1, 2).ndim, 2);
  EXPECT_EQ(to_doubles(view.transpose(0, 2).select(0, 1)), (Doubles{1, 13, 5, 17, 9, 21}));
  EXPECT_EQ(to_doubles(view.split(2, 2, 2).select(2, 1)),
            (Doubles{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23}));
  EXPECT_EQ(to_string(view.fuse(0)), "i32[6, 4] strides [4, 1]");
  EXPECT_EQ(to_doubles(view.fuse(1).fuse(0)), count_up(24));
  EXPECT_EQ(*view.ptr<std::int32_t>({1, 2, 3}), 23);
}

TEST(TensorViewTest, StridesMayBeZeroOrNegative) {
  const Tensor tensor = iota(DType::f32, {3, 4});
  TensorView reversed = tensor.view();
  reversed.data = tensor.ptr<float>({2, 3});
  reversed.strides = {-4, -1};
  EXPECT_EQ(to_doubles(reversed), (Doubles{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(to_doubles(reversed.slice(0, 1, 2)), (Doubles{7, 6, 5, 4}));
  EXPECT_EQ(to_doubles(reversed.fuse(0)), (Doubles{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}));
  TensorView broadcast = tensor.view();
  broadcast.strides = {0, 1};
  EXPECT_EQ(to_doubles(broadcast), (Doubles{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_FALSE(broadcast.is_contiguous());
  EXPECT_THROW(broadcast.fuse(0), Error);
}

TEST(TensorViewTest, FuseNeedsNeighboursInMemoryUnlessAnExtentIsOne) {
  const Tensor tensor = iota(DType::f32, {2, 1, 4});
  EXPECT_THROW(tensor.view().slice(2, 0, 3).fuse(0).fuse(0), Error);
  EXPECT_EQ(to_string(tensor.view().slice(2, 0, 3).fuse(0)), "f32[2, 3] strides [4, 1]");
  EXPECT_EQ(to_string(tensor.view().slice(2, 0, 3).fuse(1)), "f32[2, 3] strides [4, 1]");
  EXPECT_EQ(to_string(tensor.view().transpose(1, 2).fuse(1)), "f32[2, 4] strides [4, 1]");
}

TEST(TensorViewTest, ContiguityIgnoresExtentsOfOneAndEmptyViews) {
  const Tensor tensor = iota(DType::f32, {3, 4});
  TensorView view = tensor.view().slice(0, 1, 2);
  view.strides[0] = 99;
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_FALSE(tensor.view().slice(1, 0, 3).is_contiguous());
  EXPECT_FALSE(tensor.view().transpose(0, 1).is_contiguous());
  EXPECT_TRUE(tensor.view().slice(1, 2, 2).is_contiguous());
}

TEST(TensorViewTest, AbsentEmptyAndScalarViewsAreToldApart) {
  const TensorView absent;
  EXPECT_FALSE(absent);
  EXPECT_EQ(absent.numel(), 0);
  EXPECT_EQ(to_string(absent), "absent");
  const Tensor empty = Tensor::empty(DType::f32, {0, 5});
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.view().numel(), 0);
  const Tensor scalar = Tensor::zeros(DType::f32, {});
  EXPECT_EQ(scalar.view().numel(), 1);
  EXPECT_EQ(scalar.nbytes(), 4);
}

TEST(TensorViewTest, WhatIsOutOfRangeIsRefused) {
  const Tensor tensor = iota(DType::f32, {3, 4});
  const TensorView& view = tensor;
  EXPECT_THROW(view.slice(2, 0, 1), Error);
  EXPECT_THROW(view.slice(-1, 0, 1), Error);
  EXPECT_THROW(view.slice(0, -1, 1), Error);
  EXPECT_THROW(view.slice(0, 2, 1), Error);
  EXPECT_THROW(view.slice(0, 0, 4), Error);
  EXPECT_THROW(view.select(0, 3), Error);
  EXPECT_THROW(view.select(0, -1), Error);
  EXPECT_THROW(view.split(1, 3, 2), Error);
  EXPECT_THROW(view.split(1, -2, -2), Error);
  EXPECT_THROW(view.split(1, std::int64_t{1} << 62, 4), Error);
  EXPECT_THROW(view.fuse(1), Error);
  EXPECT_THROW(view.transpose(0, 2), Error);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::f32, {1, 1, 1, 1, 1, 1, 1}), Error);
  const TensorView full =
      TensorView::contiguous(tensor.view().data, DType::f32, {1, 1, 1, 1, 3, 4});
  EXPECT_THROW(full.split(5, 2, 2), Error);
  try {
    view.slice(0, 1, 9);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("f32[3, 4]"), std::string::npos) << error.what();
  }
}

TEST(TensorViewTest, PackedElementsAreAddressedByWholeBytesOnly) {
  Tensor tensor = Tensor::zeros(DType::i4, {3, 6});
  EXPECT_EQ(tensor.nbytes(), 9);
  const TensorView& view = tensor;
  const auto* base = static_cast<const std::byte*>(view.data);
  EXPECT_EQ(static_cast<const std::byte*>(view.select(0, 2).data) - base, 6);
  EXPECT_EQ(static_cast<const std::byte*>(view.slice(1, 2, 4).data) - base, 1);
  EXPECT_THROW(view.slice(1, 1, 3), Error);
  EXPECT_THROW(view.slice(1, 0, 3), Error);
  EXPECT_THROW(view.select(1, 0), Error);
  EXPECT_THROW(view.split(1, 2, 3), Error);
  EXPECT_THROW(view.transpose(0, 1), Error);
  EXPECT_THROW(Tensor::empty(DType::f4e2m1, {4, 3}), Error);
}

TEST(TensorTest, BadShapesAreRefusedBeforeAnythingIsAllocated) {
  EXPECT_THROW(Tensor::empty(DType::f32, {3, -1}), Error);
  EXPECT_THROW(Tensor::empty(DType::f32, {std::int64_t{1} << 32, std::int64_t{1} << 32}), Error);
  EXPECT_THROW(Tensor::empty(DType::f32, {std::int64_t{1} << 61}), Error);
  // An overflow that a zero extent would hide.
  EXPECT_THROW(Tensor::empty(DType::f32, {0, std::int64_t{1} << 32, std::int64_t{1} << 32}), Error);
  EXPECT_THROW(Tensor::empty(DType::f32, {std::int64_t{1} << 32, std::int64_t{1} << 32, 0}), Error);
}

TEST(TensorTest, MovingLeavesAnAbsentTensorBehind) {
  Tensor a = iota(DType::f32, {4});
  const void* memory = a.view().data;
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
  Tensor b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what is left is specified.
  EXPECT_EQ(b.view().data, memory);
  a = std::move(b);
  EXPECT_FALSE(b);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(to_doubles(a), (Doubles{0, 1, 2, 3}));
}

class CopyTest : public ::testing::TestWithParam<std::pair<DType, DType>> {};

TEST_P(CopyTest, ConvertsBetweenStridedViewsAndTouchesNothingElse) {
  const auto [from, to] = GetParam();
  test::PaddedTensor src(from, {3, 4, 5});
  test::fill_normal(src, 7);
  test::PaddedTensor dst(to, {5, 4, 3});
  copy(src, dst.view().transpose(0, 2));
  Doubles expected;
  for (const double x : to_doubles(src)) {
    // Every source value is a float32, so rounding the double once is rounding the float32.
    std::byte bytes[4];
    test::store_element(to, bytes, x);
    expected.push_back(test::load_element(to, bytes));
  }
  EXPECT_TRUE(test::values_close(expected, dst.view().transpose(0, 2), 0));
  EXPECT_TRUE(dst.padding_untouched());
  EXPECT_TRUE(src.padding_untouched());
}

INSTANTIATE_TEST_SUITE_P(
    ComputeDtypes, CopyTest,
    ::testing::Values(std::pair{DType::f32, DType::f32}, std::pair{DType::f32, DType::f16},
                      std::pair{DType::f32, DType::bf16}, std::pair{DType::f16, DType::f32},
                      std::pair{DType::f16, DType::f16}, std::pair{DType::f16, DType::bf16},
                      std::pair{DType::bf16, DType::f32}, std::pair{DType::bf16, DType::f16},
                      std::pair{DType::bf16, DType::bf16}),
    [](const auto& pair) {
      return std::string(name_of(pair.param.first)) + "_to_" +
             std::string(name_of(pair.param.second));
    });

TEST(CopyTest, EqualDtypesMoveBitsNaNPayloadsIncluded) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3fn, DType::i32, DType::i64}) {
    const Tensor src = Tensor::empty(dtype, {6, 4});
    auto* bytes = static_cast<std::uint8_t*>(src.view().data);
    for (std::int64_t i = 0; i < src.nbytes(); ++i) {
      bytes[i] = static_cast<std::uint8_t>(test::random_bits(3, static_cast<std::uint64_t>(i)));
    }
    const Tensor dst = Tensor::zeros(dtype, {4, 6});
    copy(src.view().transpose(0, 1), dst);
    EXPECT_TRUE(test::bits_equal(src.view().transpose(0, 1), dst)) << name_of(dtype);
  }
}

TEST(CopyTest, PackedRowsAreCopied) {
  const Tensor src = Tensor::empty(DType::i4, {3, 4});
  auto* bytes = static_cast<std::uint8_t*>(src.view().data);
  for (std::uint8_t i = 0; i < 6; ++i) bytes[i] = static_cast<std::uint8_t>(17 * i + 1);
  const Tensor dst = Tensor::zeros(DType::i4, {3, 8});
  copy(src, dst.view().slice(1, 2, 6));
  const auto* got = static_cast<const std::uint8_t*>(dst.view().data);
  const std::uint8_t expected[] = {0, 1, 18, 0, 0, 35, 52, 0, 0, 69, 86, 0};
  for (std::size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(got[i], expected[i]) << i;
}

TEST(CopyTest, EmptyAndScalarViewsAreCopied) {
  const Tensor empty = Tensor::empty(DType::f32, {0, 3});
  copy(empty, empty);
  const double value[] = {2.5};
  const Tensor scalar = test::tensor_from(DType::f32, {}, value);
  const Tensor narrow = Tensor::zeros(DType::bf16, {});
  copy(scalar, narrow);
  EXPECT_EQ(to_doubles(narrow), (Doubles{2.5}));
}

TEST(CopyTest, WhatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
  const Tensor src = iota(DType::f32, {2, 3});
  const Tensor other = Tensor::zeros(DType::f32, {3, 2});
  EXPECT_THROW(copy(src, other), Error);
  EXPECT_THROW(copy(src, TensorView{}), Error);
  EXPECT_THROW(copy(src, Tensor::zeros(DType::f32, {2, 3, 1})), Error);
  EXPECT_EQ(to_doubles(other), Doubles(6, 0));
  try {
    copy(src, Tensor::zeros(DType::i32, {2, 3}));
    FAIL() << "f32 is not converted to i32";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
  TensorView on_gpu = other;
  on_gpu.shape = src.view().shape;
  on_gpu.device = {Device::Type::cuda, 0};
  EXPECT_THROW(copy(src, on_gpu), Error);
}

/// A device whose memory is the host's, so that a test can look at it.
struct FakeDevice {
  static inline int allocated = 0, copied = 0;
  static MemorySource memory() {
    return {.device = {Device::Type::cuda, 3},
            .allocate =
                [](Device, std::int64_t bytes) {
                  ++allocated;
                  return static_cast<std::byte*>(std::malloc(static_cast<std::size_t>(bytes)));
                },
            .free =
                [](Device device, std::byte* memory) {
                  EXPECT_EQ(device.index, 3);
                  --allocated;
                  std::free(memory);
                },
            .copy =
                [](Device, void* to, const void* from, std::int64_t bytes, void*) {
                  ++copied;
                  std::memcpy(to, from, static_cast<std::size_t>(bytes));
                }};
  }
};

/// What a tensor of the device holds.
Doubles held(const Tensor& tensor) {
  TensorView view = tensor;
  view.device = {};
  return to_doubles(view);
}

TEST(DeviceTensorTest, ComesFromItsSourceAndGoesBackToIt) {
  {
    Tensor tensor = Tensor::empty(DType::f32, {2, 3}, FakeDevice::memory());
    EXPECT_EQ(tensor.view().device, (Device{Device::Type::cuda, 3}));
    EXPECT_EQ(FakeDevice::allocated, 1);
    const Tensor moved = std::move(tensor);
    tensor = Tensor::empty(DType::i8, {0}, FakeDevice::memory());
    EXPECT_EQ(FakeDevice::allocated, 2);
  }
  EXPECT_EQ(FakeDevice::allocated, 0);
}

TEST(DeviceTensorTest, TakesValuesOfAnyStridesAndComputeDtype) {
  const Tensor src = iota(DType::f32, {2, 3});
  const Tensor same = Tensor::copy_of(src, FakeDevice::memory());
  EXPECT_EQ(held(same), count_up(6));
  const Tensor turned = Tensor::copy_of(src.view().transpose(0, 1), FakeDevice::memory());
  EXPECT_EQ(held(turned), (Doubles{0, 3, 1, 4, 2, 5}));
  const Tensor narrow = Tensor::empty(DType::bf16, {2, 3}, FakeDevice::memory());
  FakeDevice::copied = 0;
  narrow.assign(src);
  EXPECT_EQ(held(narrow), count_up(6));
  EXPECT_EQ(FakeDevice::copied, 1);
  EXPECT_THROW(narrow.assign(src.view().transpose(0, 1)), Error);
  EXPECT_FALSE(Tensor::copy_of({}, FakeDevice::memory()));
}

}  // namespace
}  // namespace fovea
