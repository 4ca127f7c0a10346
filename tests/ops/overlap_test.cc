// Which views share memory.
#include "ops/overlap.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "support/poison.h"

namespace fovea::test {
namespace {

/// Every byte of a view, the slow way.
std::set<const std::byte*> bytes_of_view(const TensorView& view) {
  std::set<const std::byte*> bytes;
  for_each_element(view, [&](const auto&, const std::byte* address, std::int64_t) {
    for (std::int64_t b = 0; b < bytes_of(view.dtype, 1); ++b) bytes.insert(address + b);
  });
  return bytes;
}

bool share_a_byte(const TensorView& a, const TensorView& b) {
  const std::set<const std::byte*> in_a = bytes_of_view(a);
  for (const std::byte* byte : bytes_of_view(b)) {
    if (in_a.contains(byte)) return true;
  }
  return false;
}

class Overlap : public ::testing::Test {
 protected:
  /// Some strided view of up to three dimensions inside `memory_`.
  TensorView random_view(std::uint64_t seed) {
    TensorView view;
    view.dtype = random_below(seed, 0, 2) == 0 ? DType::bf16 : DType::f32;
    view.ndim = static_cast<int>(1 + random_below(seed, 1, 3));
    std::int64_t offset = random_below(seed, 2, 200);
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.ndim); ++d) {
      view.shape[d] = 1 + random_below(seed, 3 + d, 5);
      view.strides[d] = random_below(seed, 6 + d, 61) - 20;
      if (view.strides[d] < 0) offset -= view.strides[d] * (view.shape[d] - 1);
    }
    view.data = memory_.data() + offset * bytes_of(view.dtype, 1);
    return view;
  }
  std::vector<std::byte> memory_ = std::vector<std::byte>(16384);
};

TEST_F(Overlap, AgreesWithAListOfAllBytes) {
  int overlapping = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    const TensorView a = random_view(2 * seed), b = random_view(2 * seed + 1);
    const bool expected = share_a_byte(a, b);
    overlapping += expected ? 1 : 0;
    EXPECT_EQ(overlaps(a, b), expected)
        << to_string(a) << " at " << a.data << ", " << to_string(b) << " at " << b.data;
  }
  EXPECT_GT(overlapping, 300);
  EXPECT_LT(overlapping, 2700);
}

TEST_F(Overlap, SlicesOfOneProjectionAreApart) {
  const TensorView projection = TensorView::contiguous(memory_.data(), DType::bf16, {8, 16, 48});
  EXPECT_FALSE(overlaps(projection.slice(2, 0, 32), projection.slice(2, 32, 48)));
  EXPECT_TRUE(overlaps(projection.slice(2, 0, 33), projection.slice(2, 32, 48)));
  EXPECT_FALSE(overlaps(projection.slice(1, 0, 4), projection.slice(1, 4, 16)));
  EXPECT_TRUE(overlaps(projection, projection.select(1, 15)));
}

TEST_F(Overlap, EmptyViewsShareNothing) {
  const TensorView view = TensorView::contiguous(memory_.data(), DType::f32, {4, 4});
  EXPECT_FALSE(overlaps(view, view.slice(0, 2, 2)));
  EXPECT_FALSE(overlaps(view, TensorView{}));
}

TEST_F(Overlap, BroadcastAndFoldedViewsOverlapThemselves) {
  TensorView view = TensorView::contiguous(memory_.data(), DType::f32, {4, 4, 8});
  EXPECT_FALSE(overlaps_itself(view));
  EXPECT_FALSE(overlaps_itself(view.transpose(0, 2)));
  view.strides[0] = 0;
  EXPECT_TRUE(overlaps_itself(view));
  view.strides[0] = 24;
  EXPECT_TRUE(overlaps_itself(view));
  view.shape[0] = 1;
  EXPECT_FALSE(overlaps_itself(view));
}

}  // namespace
}  // namespace fovea::test
