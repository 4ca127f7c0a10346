#include "fovea/workspace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "support/poison.h"

namespace fovea {
namespace {

TEST(WorkspaceTest, ScopesNestGiveBackAndKeepThePeak) {
  Workspace workspace;
  workspace.reserve(1000);
  EXPECT_EQ(workspace.capacity(), 1024);
  {
    WorkspaceScope outer(workspace);
    auto* a = outer.take<float>(3);
    EXPECT_EQ(workspace.used(), 64);
    {
      WorkspaceScope inner(workspace);
      auto* b = inner.take<double>(100);
      EXPECT_EQ(reinterpret_cast<std::byte*>(b) - reinterpret_cast<std::byte*>(a), 64);
      EXPECT_EQ(workspace.used(), 64 + Workspace::rounded(800));
    }
    EXPECT_EQ(workspace.used(), 64);
    const TensorView view = outer.take(DType::bf16, {2, 3, 5});
    EXPECT_EQ(view.numel(), 30);
    EXPECT_TRUE(view.is_contiguous());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % Workspace::kAlignment, 0u);
  }
  EXPECT_EQ(workspace.used(), 0);
  EXPECT_EQ(workspace.peak(), 64 + 832);
  workspace.reset_peak();
  EXPECT_EQ(workspace.peak(), 0);
}

TEST(WorkspaceTest, ReserveOnlyGrowsAndNotWhileTaken) {
  Workspace workspace;
  workspace.reserve(4096);
  workspace.reserve(64);
  EXPECT_EQ(workspace.capacity(), 4096);
  {
    WorkspaceScope scope(workspace);
    scope.take_bytes(1);
    EXPECT_THROW(workspace.reserve(8192), Error);
  }
  workspace.reserve(8192);
  EXPECT_EQ(workspace.capacity(), 8192);
  EXPECT_THROW(workspace.reserve(-1), Error);
  EXPECT_THROW(workspace.reserve(std::numeric_limits<std::int64_t>::max()), Error);
}

TEST(WorkspaceTest, WhatDoesNotFitIsRefusedWithBothSizesAndTakesNothing) {
  Workspace workspace;
  workspace.reserve(128);
  WorkspaceScope scope(workspace);
  scope.take_bytes(65);
  EXPECT_EQ(workspace.used(), 128);
  try {
    scope.take_bytes(777);
    FAIL() << "777 bytes do not fit";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    EXPECT_NE(std::string(error.what()).find("777"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("128"), std::string::npos);
  }
  EXPECT_EQ(workspace.used(), 128);
  EXPECT_THROW(scope.take_bytes(-1), Error);
  EXPECT_THROW(scope.take_bytes(std::numeric_limits<std::int64_t>::max()), Error);
  EXPECT_THROW(scope.take<double>(std::numeric_limits<std::int64_t>::max() / 4), Error);
}

TEST(WorkspaceTest, TakingNothingGivesAPresentPointerEvenWithoutMemory) {
  Workspace workspace;
  WorkspaceScope scope(workspace);
  EXPECT_NE(scope.take_bytes(0), nullptr);
  EXPECT_TRUE(scope.take(DType::f32, {0, 7}));
  EXPECT_EQ(workspace.used(), 0);
}

TEST(WorkspaceTest, PoisonReachesEveryFreeByte) {
  Workspace workspace;
  workspace.reserve(256);
  test::poison(workspace);
  EXPECT_EQ(workspace.peak(), 0);
  WorkspaceScope scope(workspace);
  EXPECT_TRUE(test::still_poisoned(scope.take_bytes(256), 256));
}

}  // namespace
}  // namespace fovea
