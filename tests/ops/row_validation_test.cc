// Bad operands of the ops that work row by row, and dispatch with reasons.
#include <functional>
#include <limits>

#include "ops/backend.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;

class RowValidation : public ::testing::Test {
 protected:
  const OpContext& ctx() const { return runtime_; }

 private:
  Runtime runtime_{options_of("reference", 1)};
};

template <class Params>
struct Bad {
  std::function<void(Params&)> spoil;
  std::vector<std::string> parts;
};

TEST_F(RowValidation, RmsNorm) {
  const Tensor x = Tensor::zeros(DType::f16, {3, 8}), weight = Tensor::zeros(DType::f16, {8});
  const PaddedTensor out(DType::f16, {3, 8});
  const Bad<RmsNormParams> cases[] = {
      {[](auto& p) { p.x = {}; }, {"x is absent", "[T, D]"}},
      {[](auto& p) { p.x.dtype = DType::i64; }, {"x is i64"}},
      {[](auto& p) { p.x = p.x.transpose(0, 1); },
       {"x is f16[8, 3]", "innermost stride must be 1"}},
      {[](auto& p) { p.weight = p.weight.slice(0, 0, 7); }, {"weight", "[7]", "D = 8"}},
      {[](auto& p) { p.out = p.out.slice(0, 0, 2); }, {"out", "[2, 8]", "T = 3"}},
      {[](auto& p) { p.out.dtype = DType::bf16; }, {"out", "bf16[3, 8]", "must be f16"}},
      {[](auto& p) { p.eps = -1; }, {"eps is -1"}},
      {[](auto& p) {
         p.out = p.x;
         p.out.strides[0] = 7;
       },
       {"out", "share memory"}},
      {[](auto& p) {
         p.x = p.out;
         p.x.data = static_cast<Float16*>(p.out.data) + 1;
       },
       {"out", "shares memory with x"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    RmsNormParams params{x, weight, out, 1e-6f};
    spoil(params);
    expect_error(kInvalid, parts, [&] { rms_norm(ctx(), params); });
    EXPECT_TRUE(all_nan(out));
  }
}

TEST_F(RowValidation, AddResidual) {
  const PaddedTensor x(DType::f16, {3, 8});
  const Tensor y = Tensor::zeros(DType::f16, {3, 8});
  const Bad<AddResidualParams> cases[] = {
      {[](auto& p) { p.x = {}; }, {"x is absent", "[T, D]"}},
      {[](auto& p) { p.x.dtype = DType::i64; }, {"x is i64"}},
      {[](auto& p) { p.y = p.y.slice(0, 0, 2); }, {"y", "[2, 8]", "T = 3"}},
      {[](auto& p) { p.y.dtype = DType::bf16; }, {"y", "bf16[3, 8]", "must be f16"}},
      {[](auto& p) { p.scale = std::numeric_limits<float>::infinity(); }, {"scale is inf"}},
      {[](auto& p) { p.y = p.x; }, {"x", "shares memory with y"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    AddResidualParams params{x, y, 1.f};
    spoil(params);
    expect_error(kInvalid, parts, [&] { add_residual(ctx(), params); });
    EXPECT_TRUE(all_nan(x));
  }
}

TEST_F(RowValidation, Rope) {
  const PaddedTensor x(DType::f32, {2, 3, 8});
  const Tensor table = Tensor::zeros(DType::f32, {10, 8});
  const std::int32_t index[] = {4, 9}, negative[] = {4, -1}, beyond[] = {10, 0};
  const std::int32_t axes[] = {0, 1, 2, 3, 4, 10};
  const Tensor floats = Tensor::zeros(DType::f32, {2});
  const Bad<RopeParams> cases[] = {
      {[](auto& p) { p.x = p.x.slice(2, 0, 7); }, {"x is", "R must be even"}},
      {[](auto& p) { p.angles.positions = p.angles.positions.slice(0, 0, 1); },
       {"positions", "[1]", "T = 2"}},
      {[&](auto& p) { p.angles.positions = floats; }, {"positions is f32", "i32 or i64"}},
      {[&](auto& p) { p.angles.positions = TensorView::of(negative, {2}); },
       {"positions[1] is -1", "[0, 10)"}},
      {[&](auto& p) {
         p.angles.positions = TensorView::of(beyond, {1, 2});
       },
       {"positions[0] is 10", "[0, 10)"}},
      {[](auto& p) { p.angles.cos_sin = p.angles.cos_sin.slice(1, 0, 4); },
       {"cos_sin", "[10, 4]", "R = 8"}},
      {[](auto& p) { p.angles.cos_sin = p.angles.cos_sin.split(0, 5, 2).select(1, 0); },
       {"cos_sin", "contiguous"}},
      {[](auto& p) { p.angles.pairing = static_cast<RopePairing>(7); }, {"pairing is 7"}},
      {[](auto& p) { p.x.strides[1] = 0; }, {"x is", "must not share memory"}},
      {[](auto& p) { p.angles.sections.interleaved = true; }, {"sections.interleaved", "pairs"}},
      {[](auto& p) {
         p.angles.sections.pairs = {2, 1, 2};
       },
       {"pairs are 2, 1 and 2", "R / 2 = 4"}},
      {[](auto& p) {
         p.angles.sections.pairs = {-1, 3, 2};
       },
       {"pairs are -1, 3 and 2", "not be negative"}},
      {[](auto& p) {
         p.angles.sections.pairs = {2, 1, 1};
       },
       {"positions is i32[2]", "[3, T]"}},
      {[&](auto& p) {
         p.angles.sections.pairs = {2, 1, 1};
         p.angles.positions = TensorView::of(axes, {3, 2});
       },
       {"positions[5] is 10", "[0, 10)"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    RopeParams params{x, {TensorView::of(index, {2}), table, RopePairing::neox, {}}};
    spoil(params);
    expect_error(kInvalid, parts, [&] { rope(ctx(), params); });
    EXPECT_TRUE(all_nan(x));
  }
}

TEST_F(RowValidation, KvAppendWritesNothingWhenOneSlotIsBad) {  // B069, B070
  const KvFormat format{DType::bf16, 40};
  const Tensor memory = Tensor::empty(DType::u8, {48 * format.row_bytes()});
  poison(memory.view());
  const PagedKvCache cache =
      PagedKvCache::view(memory.view().data, format, {.num_blocks = 3, .block_size = 16});
  const Tensor kv_c = Tensor::zeros(DType::bf16, {3, 32}),
               k_pe = Tensor::zeros(DType::bf16, {3, 8});
  for (std::int64_t slot :
       {std::int64_t{48}, std::int64_t{99 * 16}, std::int64_t{-2},
        (std::int64_t{1} << 31) / 576 + 1, (std::int64_t{1} << 32) + 5,  // 5 in 32 bits. B037
        std::numeric_limits<std::int64_t>::max()}) {
    const std::int64_t slots[] = {0, -1, slot};
    expect_error(kInvalid, {"slot_mapping[2] is " + std::to_string(slot), "-1 (skip)", "[0, 48)"},
                 [&] {
                   kv_append(ctx(), {kv_c, k_pe, TensorView::of(slots, {3}), &cache});
                 });
  }
  const std::int32_t slots[] = {0, 1, 2};
  const TensorView positions = TensorView::of(slots, {3});
  const Tensor cos_sin = Tensor::zeros(DType::f32, {3, 8});
  const TensorView in_cache = TensorView::contiguous(memory.view().data, DType::bf16, {3, 32});
  const Bad<KvAppendParams> cases[] = {
      {[](auto& p) { p.cache = nullptr; }, {"cache is null", "40"}},
      {[](auto& p) { p.kv_c = p.kv_c.slice(1, 0, 31); }, {"rows of 40", "L + R = 39"}},
      {[](auto& p) { p.k_pe = p.k_pe.slice(0, 0, 2); }, {"k_pe", "[2, 8]", "T = 3"}},
      {[](auto& p) { p.slot_mapping = p.slot_mapping.slice(0, 0, 2); }, {"slot_mapping", "T = 3"}},
      {[](auto& p) { p.slot_mapping.dtype = DType::u8; }, {"slot_mapping is u8", "i32 or i64"}},
      {[&](auto& p) { p.kv_c = in_cache; }, {"cache", "shares memory with kv_c"}},
      {[&](auto& p) { p.norm_weight = kv_c.view().select(0, 0).slice(0, 0, 31); },
       {"norm_weight", "[31]", "L = 32"}},
      {[&](auto& p) {
         p.norm_weight = kv_c.view().select(0, 0);
         p.norm_eps = -1;
       },
       {"norm_eps is -1"}},
      {[&](auto& p) { p.rope.positions = positions; }, {"cos_sin is absent"}},
      {[&](auto& p) { p.rope = {positions, cos_sin.view().slice(1, 0, 6), {}, {}}; },
       {"cos_sin", "R = 8"}},
      {[&](auto& p) { p.rope = {positions, cos_sin.view().slice(0, 0, 2), {}, {}}; },
       {"positions[2] is 2", "[0, 2)"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    KvAppendParams params{kv_c, k_pe, TensorView::of(slots, {3}), &cache};
    spoil(params);
    expect_error(kInvalid, parts, [&] { kv_append(ctx(), params); });
  }
  EXPECT_TRUE(still_poisoned(memory.view().data, memory.nbytes()));
}

TEST_F(RowValidation, KvGather) {  // B066, B074
  const PagedKvCache cache =
      PagedKvCache::allocate({DType::f32, 40}, {.num_blocks = 3, .block_size = 4});
  const std::vector<std::int32_t> table{2, 0, 99, 1, 99, 99}, starts{3, 0}, lens{4, 2};
  const std::vector<std::int32_t> negative{3, -1}, longer{6, 0}, one{3};
  const PaddedTensor out(DType::f32, {6, 40});
  const Bad<KvGatherParams> cases[] = {
      {[&](auto& p) { p.starts = one; }, {"starts has 1", "seq_lens, 2"}},
      {[&](auto& p) { p.starts = negative; }, {"starts[1] is -1"}},
      {[&](auto& p) { p.seq_lens = negative; }, {"seq_lens[1] is -1"}},
      {[&](auto& p) { p.seq_lens = longer; }, {"block_table[0, 2] is 99", "[0, 3)"}},
      {[](auto& p) { p.block_table.width = 1; }, {"block_table has 1 columns", "needs 2"}},
      {[](auto& p) { p.out = p.out.slice(0, 0, 5); }, {"out", "[5, 40]", "sum(seq_lens) = 6"}},
      {[](auto& p) { p.out.dtype = DType::i32; }, {"out is i32"}},
      {[](auto& p) { p.cache = nullptr; }, {"cache is null"}},
      {[&](auto& p) {
         p.out.data = cache.row(1, 0);
         p.out.strides[0] = 40;
       },
       {"shares memory with cache"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    KvGatherParams params{&cache, {table.data(), 2, 3, 3}, starts, lens, out};
    spoil(params);
    expect_error(kInvalid, parts, [&] { kv_gather(ctx(), params); });
    EXPECT_TRUE(all_nan(out));
  }
}

TEST_F(RowValidation, MergeState) {
  const Tensor a = Tensor::zeros(DType::f32, {3, 4, 16}), b = Tensor::zeros(DType::f32, {3, 4, 16});
  const Tensor a_lse = Tensor::zeros(DType::f32, {4, 3}), b_lse = Tensor::zeros(DType::f32, {4, 3});
  const PaddedTensor out(DType::f32, {3, 4, 16}), lse(DType::f32, {4, 3});
  const Bad<MergeStateParams> cases[] = {
      {[](auto& p) { p.prefix.out = {}; }, {"prefix.out is absent"}},
      {[](auto& p) { p.prefix.lse = {}; }, {"prefix.lse is absent"}},
      {[](auto& p) { p.suffix.lse = p.suffix.lse.transpose(0, 1); },
       {"suffix.lse", "[3, 4]", "N = 4, T = 3"}},
      {[](auto& p) { p.suffix.out = p.suffix.out.slice(2, 0, 15); }, {"suffix.out", "D = 16"}},
      {[](auto& p) { p.suffix.out.dtype = DType::u8; }, {"suffix.out is u8"}},
      {[](auto& p) { p.result.out = p.result.out.slice(0, 0, 2); }, {"result.out", "T = 3"}},
      {[](auto& p) { p.result.lse.dtype = DType::i32; }, {"result.lse is i32"}},
      {[](auto& p) { p.sinks = p.prefix.lse.select(1, 0).slice(0, 0, 3); },
       {"sinks", "[3]", "N = 4"}},
      {[](auto& p) {
         p.sinks = p.prefix.lse.select(1, 0);
         p.sinks.dtype = DType::i32;
       },
       {"sinks is i32", "must be f32"}},
      {[](auto& p) { p.sinks = p.result.lse.select(1, 0); }, {"lse", "shares memory with sinks"}},
      {[](auto& p) { p.result.out.strides[0] = 0; }, {"result.out", "must not share memory"}},
      {[](auto& p) {
         p.result.out = p.prefix.out;
         std::swap(p.result.out.strides[0], p.result.out.strides[1]);
         p.result.out.strides[1] = 4 * 16;
         p.result.out.strides[0] = 16;
       },
       {"result.out", "share"}},
      {[](auto& p) { p.result.lse.data = p.prefix.out.data; }, {"result.lse", "prefix.out"}},
  };
  for (const auto& [spoil, parts] : cases) {
    SCOPED_TRACE(parts.front());
    MergeStateParams params{{a, a_lse}, {b, b_lse}, {out, lse}, {}};
    spoil(params);
    expect_error(kInvalid, parts, [&] { merge_state(ctx(), params); });
    EXPECT_TRUE(all_nan(out));
    EXPECT_TRUE(all_nan(lse));
  }
}

TEST_F(RowValidation, AnOpWithoutImplementationsSaysSo) {
  const Backend* none[] = {nullptr};
  OpContext bare = ctx();
  bare.backends = std::span(none, 0);
  const Tensor x = Tensor::zeros(DType::f32, {1, 4}), weight = Tensor::zeros(DType::f32, {4});
  expect_error(kInvalid, {"rms_norm", "0 backends", "Runtime"}, [&] {
    rms_norm(bare, {x, weight, x});
  });
}

void must_not_run(const OpContext&, const RmsNormParams&) { ADD_FAILURE() << "it had declined"; }
int runs = 0;
void count_run(const OpContext&, const RmsNormParams&) { ++runs; }
const char* no_f16(const RmsNormParams& p) {
  return p.x.dtype == DType::f16 ? "f16 is slow" : nullptr;
}
const char* nothing(const RmsNormParams&) { return "it is Sunday"; }

TEST_F(RowValidation, DispatchTakesTheFirstThatDoesNotDeclineAndGivesReasons) {
  constexpr Implementation<RmsNormParams> kFirst[] = {{"picky", nothing, nullptr, must_not_run}};
  constexpr Implementation<RmsNormParams> kSecond[] = {{"wide", no_f16, nullptr, count_run}};
  Backend first{}, second{};
  first.name = "one";
  first.rms_norm = kFirst;
  second.name = "two";
  second.rms_norm = kSecond;
  const Backend* backends[] = {&first, &second};
  OpContext context = ctx();
  context.backends = backends;

  Tensor x = Tensor::zeros(DType::f32, {1, 4});
  const Tensor weight = Tensor::zeros(DType::f32, {4});
  runs = 0;
  rms_norm(context, {x, weight, x});
  EXPECT_EQ(runs, 1);
  x = Tensor::zeros(DType::f16, {1, 4});
  expect_error(ErrorCode::unsupported,
               {"rms_norm", "one/picky: it is Sunday", "two/wide: f16 is slow"}, [&] {
                 rms_norm(context, {x, weight, x});
               });

  const auto reason_of = [&](DType dtype, const std::string& implementation) {
    for (const ImplementationChoice& choice : explain_implementations(context, dtype)) {
      if (choice.op == "rms_norm" && choice.implementation == implementation) return choice.reason;
    }
    return std::string("not listed");
  };
  EXPECT_EQ(reason_of(DType::f32, "one/picky"), "it is Sunday");
  EXPECT_EQ(reason_of(DType::f32, "two/wide"), "");
  EXPECT_EQ(reason_of(DType::f16, "two/wide"), "f16 is slow");
}

}  // namespace
}  // namespace fovea::test
