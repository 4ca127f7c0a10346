// Draft trees whose lengths and blocks are in device memory, prepared for two calls, against the
// same call with a schedule of the host, whose results the tests of the ops compare with the oracle.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "fovea/error.h"
#include "fovea/ops.h"
#include "fovea/runtime.h"
#include "support/compare.h"
#include "support/poison.h"

namespace fovea::test {
namespace {

constexpr std::int64_t kRequests = 3, kTokens = 8, kBlockSize = 16, kWidth = 8;
constexpr std::int64_t kBlocks = kRequests * kWidth;
const std::vector<std::int32_t> kQueryStart{0, 5, 8, 8};
/// Two branches, a chain, and a request without tokens.
const std::vector<std::uint64_t> kTree{0b00001, 0b00011, 0b00101, 0b01101, 0b10011, 1, 3, 7};

class PreparedTree : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    try {
      runtime_ = std::make_unique<Runtime>(RuntimeOptions{
          .backend = "cuda", .isa = GetParam(), .num_threads = 1, .own_cuda_stream = true});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      GTEST_SKIP() << error.what();
    }
    table_ = shared(DType::i32, {kRequests, kWidth});
    lens_ = shared(DType::i32, {kRequests});
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      table_.ptr<std::int32_t>()[i] = static_cast<std::int32_t>((i * 5 + 3) % kBlocks);
    }
  }
  const OpContext& ctx() const { return *runtime_; }
  Tensor shared(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return Tensor::empty(dtype, shape, ctx().host_memory);
  }
  Tensor normal(std::initializer_list<std::int64_t> shape, std::uint64_t seed) const {
    Tensor tensor = shared(DType::bf16, shape);
    fill_normal(tensor, seed);
    return tensor;
  }
  BlockTableView table(Device device) const {
    return {table_.ptr<std::int32_t>(), kRequests, kWidth, kWidth, device};
  }
  DecodeSchedule schedule(const std::vector<std::int32_t>& lens,
                          const AttentionVariant& variant) const {
    return schedule_decode(kQueryStart, lens, ctx().plan_target, variant, kTree);
  }

  /// `decode(params)` runs one; `set_table(params, view)` gives it a block table.
  template <class Params, class Decode, class SetTable>
  void expect_same(Params params, const Tensor& out, Decode&& decode, SetTable&& set_table) {
    const std::vector<std::int32_t> most(kRequests, kWidth * kBlockSize);
    DecodeSchedule of_device = schedule(most, params.variant);
    of_device.device_seq_lens = lens_.ptr<std::int32_t>();
    Params prepared = params;
    prepared.schedule = &of_device;
    set_table(prepared, table(ctx().memory.device));
    const std::int64_t bytes = workspace_bytes(ctx(), prepared);
    ctx().workspace->reserve(bytes);
    const Tensor memory = Tensor::empty(DType::u8, {bytes}, ctx().memory);
    prepared.prepared = memory;
    for (const std::vector<std::int32_t>& lens : {std::vector<std::int32_t>{128, 3, 0},
                                                  {5, 100, 7}, {70, 64, 128}}) {
      const DecodeSchedule of_host = schedule(lens, params.variant);
      params.schedule = &of_host;
      set_table(params, table({}));
      ctx().workspace->reserve(workspace_bytes(ctx(), params));
      decode(params);
      wait(ctx());
      const std::vector<double> expected = to_doubles(out);

      assign(lens_, std::vector<double>(lens.begin(), lens.end()));
      prepare(ctx(), prepared);
      for (int call = 0; call < 2; ++call) {
        poison(out);
        decode(prepared);
        wait(ctx());
        EXPECT_TRUE(rows_close(expected, out, row_tolerance(DType::bf16))) << lens[0];
      }
    }
  }

  std::unique_ptr<Runtime> runtime_;
  Tensor table_, lens_;
};
INSTANTIATE_TEST_SUITE_P(, PreparedTree, ::testing::Values("auto", "plain"),
                         [](const auto& param_info) { return std::string(param_info.param); });

TEST_P(PreparedTree, OfMlaDecode) {
  constexpr std::int64_t kHeads = 16, kLatent = 512, kRope = 64;
  const Tensor rows = normal({kBlocks * kBlockSize, kLatent + kRope}, 1);
  const Tensor q = normal({kTokens, kHeads, kLatent + kRope}, 2);
  const Tensor out = shared(DType::bf16, {kTokens, kHeads, kLatent});
  const PagedKvCache cache = PagedKvCache::view(rows.view().data, {DType::bf16, kLatent + kRope},
                                                {.num_blocks = kBlocks, .block_size = kBlockSize});
  for (const std::int64_t window : {-1, 20}) {
    MlaDecodeParams params;
    params.q_latent = q.view().slice(2, 0, kLatent);
    params.q_pe = q.view().slice(2, kLatent, kLatent + kRope);
    params.cache = &cache;
    params.out = out;
    params.variant.window_left = window;
    params.sm_scale = 0.05f;
    expect_same(params, out, [&](const MlaDecodeParams& p) { mla_decode(ctx(), p); },
                [](MlaDecodeParams& p, const BlockTableView& table) { p.block_table = table; });
  }
}

TEST_P(PreparedTree, OfAttentionDecode) {
  constexpr std::int64_t kHeads = 8, kKvHeads = 2, kDim = 128;
  const Tensor k = normal({kBlocks * kBlockSize, kKvHeads * kDim}, 1);
  const Tensor v = normal({kBlocks * kBlockSize, kKvHeads * kDim}, 2);
  const Tensor q = normal({kTokens, kHeads, kDim}, 3);
  const Tensor out = shared(DType::bf16, {kTokens, kHeads, kDim});
  const auto cache_of = [](const Tensor& rows) {
    return PagedKvCache::view(rows.view().data, {DType::bf16, kKvHeads * kDim},
                              {.num_blocks = kBlocks, .block_size = kBlockSize});
  };
  const PagedKvCache k_cache = cache_of(k), v_cache = cache_of(v);
  for (const std::int64_t window : {-1, 20}) {
    AttentionDecodeParams params{.q = q,
                                 .kv = {&k_cache, &v_cache, {}, kKvHeads},
                                 .out = out,
                                 .lse = {},
                                 .schedule = nullptr,
                                 .variant = {.window_left = window},
                                 .sm_scale = 0.09f,
                                 .sinks = {}};
    expect_same(params, out, [&](const AttentionDecodeParams& p) { attention_decode(ctx(), p); },
                [](AttentionDecodeParams& p, const BlockTableView& table) {
                  p.kv.block_table = table;
                });
  }
}

}  // namespace
}  // namespace fovea::test
