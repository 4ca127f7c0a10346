// A decode step of a layer in a CUDA graph, replayed with other lengths, blocks and rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "fovea/device_graph.h"
#include "fovea/error.h"
#include "fovea/mla.h"
#include "fovea/runtime.h"
#include "layers/layer_weights.h"
#include "support/compare.h"

namespace fovea::test {
namespace {

constexpr std::int64_t kRequests = 4, kBlockSize = 16, kWidth = 8, kBlocks = kRequests * kWidth;

class DecodeGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      runtime_ = std::make_unique<Runtime>(
          RuntimeOptions{.backend = "cuda", .num_threads = 1, .own_cuda_stream = true});
      make_layer();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      GTEST_SKIP() << error.what();
    }
  }

  void make_layer() {
    const LayerShape shape{.q_lora = 24, .sinks = true};
    const LayerWeights weights(shape, DType::f32, 1);
    RopeConfig rope;
    rope.dim = shape.rope;
    rope.max_position = 256;
    layer_ = std::make_unique<MlaLayer>(shape.dims(), weights.views(),
                                        std::make_shared<RotaryEmbedding>(rope, ctx().memory),
                                        MlaOptions{.memory = ctx().memory});
    const std::int64_t row = shape.latent + shape.rope;
    rows_ = shared(DType::f32, {kBlocks * kBlockSize, row});
    fill_normal(rows_, 2);
    cache_ = PagedKvCache::view(rows_.view().data, {DType::f32, row},
                                {.num_blocks = kBlocks, .block_size = kBlockSize});
    hidden_ = shared(DType::f32, {kRequests, shape.hidden});
    out_ = shared(DType::f32, {kRequests, shape.hidden});
    table_ = shared(DType::i32, {kRequests, kWidth});
    seq_lens_ = shared(DType::i32, {kRequests});
    slots_ = shared(DType::i64, {kRequests});
    positions_ = shared(DType::i64, {kRequests});
  }

  const OpContext& ctx() const { return *runtime_; }
  /// Memory that this test writes and the device reads.
  Tensor shared(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return Tensor::empty(dtype, shape, ctx().host_memory);
  }

  /// New hidden states, and blocks in an order of `seed`.
  void set(const std::vector<std::int32_t>& lens, std::uint64_t seed) const {
    fill_normal(hidden_, seed);
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      table_.ptr<std::int32_t>()[i] = static_cast<std::int32_t>(
          (i * 5 + static_cast<std::int64_t>(seed)) % kBlocks);
    }
    for (std::int64_t r = 0; r < kRequests; ++r) {
      const std::int32_t len = lens[static_cast<std::size_t>(r)];
      *seq_lens_.ptr<std::int32_t>({r}) = len;
      const std::int64_t last = std::max(len - 1, 0);
      *positions_.ptr<std::int64_t>({r}) = last;
      *slots_.ptr<std::int64_t>({r}) =
          len == 0 ? -1
                   : *table_.ptr<std::int32_t>({r, last / kBlockSize}) * kBlockSize +
                         last % kBlockSize;
    }
  }

  BatchPlan plan(const std::vector<std::int32_t>& lens) const {
    SequenceBatch batch;
    for (std::int32_t r = 0; r <= std::ssize(lens); ++r) batch.query_start_loc.push_back(r);
    batch.seq_lens = lens;
    return make_plan(batch, ctx().plan_target, {});
  }

  AttentionStep step(const BatchPlan& plan, Device table_device) const {
    const std::int64_t rows = plan.num_actual_tokens;
    return {.plan = &plan,
            .block_table = {table_.ptr<std::int32_t>(), rows, kWidth, kWidth, table_device},
            .slot_mapping = slots_.view().slice(0, 0, rows),
            .positions = positions_.view().slice(0, 0, rows)};
  }

  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<MlaLayer> layer_;
  PagedKvCache cache_;
  Tensor rows_, hidden_, out_, table_, seq_lens_, slots_, positions_;
};

TEST_F(DecodeGraph, ReplaysWithLengthsOfTheDevice) {
  BatchPlan most = plan(std::vector<std::int32_t>(kRequests, kWidth * kBlockSize));
  most.decode.device_seq_lens = seq_lens_.ptr<std::int32_t>();
  AttentionStep in_graph = step(most, ctx().memory.device);
  const Tensor prepared =
      Tensor::empty(DType::u8, {layer_->prepared_bytes(ctx(), most)}, ctx().memory);
  in_graph.prepared = prepared;
  ctx().workspace->reserve(128 << 20);  // For all below: the graph's scratch must stay.
  const auto queue = [&] {
    layer_->prepare(ctx(), in_graph, cache_);
    (*layer_)(ctx(), hidden_, out_, in_graph, cache_);
  };
  set({1, 1, 1, 1}, 1);
  queue();  // Loads the kernels.
  wait(ctx());
  const DeviceGraph graph(ctx(), queue);
  // Upload, norm and rotation of the queries, append (with those of the keys), attention; and five
  // products, each of which may add up its parts in a kernel of its own.
  EXPECT_GE(graph.num_nodes(), 10);
  EXPECT_LE(graph.num_nodes(), 15);

  std::vector<double> before;
  for (const std::vector<std::int32_t>& lens :
       {std::vector<std::int32_t>{5, 128, 33, 1}, {77, 2, 64, 100}, {0, 9, 128, 0}}) {
    set(lens, static_cast<std::uint64_t>(lens[1]));
    graph.launch();
    wait(ctx());
    const std::vector<double> got = to_doubles(out_);
    EXPECT_NE(got, before);
    before = got;

    // The same without a graph, over the requests that are not empty.
    std::vector<std::int32_t> host_lens = lens;
    std::replace(host_lens.begin(), host_lens.end(), 0, 1);
    const BatchPlan of_lens = plan(host_lens);
    const AttentionStep on_host = step(of_lens, {});
    (*layer_)(ctx(), hidden_, out_, on_host, cache_);
    wait(ctx());
    const std::vector<double> expected = to_doubles(out_);
    const std::size_t width = expected.size() / kRequests;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double wanted = lens[i / width] == 0 ? 0 : expected[i];
      ASSERT_EQ(wanted, got[i]) << "request " << i / width << " of length " << lens[i / width];
    }
  }
}

TEST_F(DecodeGraph, ATableOfTheDeviceGoesWithItsLengths) {
  set({1, 1, 1, 1}, 1);
  BatchPlan most = plan(std::vector<std::int32_t>(kRequests, 16));
  const AttentionStep without = step(most, ctx().memory.device);
  ctx().workspace->reserve(layer_->workspace_bytes(ctx(), most));
  EXPECT_THROW((*layer_)(ctx(), hidden_, out_, without, cache_), Error);
  most.decode.device_seq_lens = seq_lens_.ptr<std::int32_t>();
  const AttentionStep on_host = step(most, {});
  EXPECT_THROW((*layer_)(ctx(), hidden_, out_, on_host, cache_), Error);
}

}  // namespace
}  // namespace fovea::test
