// Ops on device memory, streams and graphs. What they compute is for tests/ops, which run on every
// backend.
#include <cuda_runtime_api.h>

#include <memory>

#include "fovea/error.h"
#include "fovea/ops.h"
#include "fovea/runtime.h"
#include "support/compare.h"

namespace fovea::test {
namespace {

void check(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

/// A copy of a host tensor in device memory.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& host) : view_(host.view()), bytes_(host.nbytes()) {
    check(cudaMalloc(&view_.data, static_cast<std::size_t>(bytes_)));
    view_.device = {Device::Type::cuda, 0};
    set(host);
  }
  ~OnDevice() { cudaFree(view_.data); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  operator const TensorView&() const { return view_; }
  void* data() const { return view_.data; }
  void set(const Tensor& host) {
    check(cudaMemcpy(view_.data, host.view().data, static_cast<std::size_t>(bytes_),
                     cudaMemcpyDefault));
    check(cudaDeviceSynchronize());  // The copy returns before the bytes have arrived.
  }
  void get(const Tensor& host) const {
    check(cudaMemcpy(host.view().data, view_.data, static_cast<std::size_t>(bytes_),
                     cudaMemcpyDefault));
  }

 private:
  TensorView view_;
  std::int64_t bytes_;
};

/// A step of MLA decode: new rows are appended, then all are attended to.
struct Step {
  static constexpr std::int64_t kHeads = 16, kLatent = 512, kRope = 64, kBlocks = 9, kBlock = 64;
  std::vector<std::int32_t> query_start{0, 1, 2}, seq_lens{300, 77};
  std::vector<std::int32_t> table{3, 1, 8, 0, 6, 2, 5, 4, 7, 7};
  Tensor cache = Tensor::empty(DType::bf16, {kBlocks * kBlock, kLatent + kRope});
  Tensor q = Tensor::empty(DType::bf16, {2, kHeads, kLatent + kRope});
  Tensor kv_c = Tensor::empty(DType::bf16, {2, kLatent});
  Tensor k_pe = Tensor::empty(DType::bf16, {2, kRope});
  /// Of the last key of each request.
  Tensor slots = tensor_from(
      DType::i64, {2}, std::vector<double>{6 * kBlock + 299 % kBlock, 5 * kBlock + 76 % kBlock});
  Tensor out = Tensor::zeros(DType::bf16, {2, kHeads, kLatent});

  explicit Step(std::uint64_t seed) {
    fill_normal(cache, seed);
    fill_normal(q, seed + 1);
    fill_normal(kv_c, seed + 2);
    fill_normal(k_pe, seed + 3);
  }
};

/// Where a step's operands are.
struct Operands {
  TensorView q, kv_c, k_pe, slots, out;
  PagedKvCache cache;
};

void run(const OpContext& ctx, const Step& step, const Operands& at,
         const DecodeSchedule& schedule) {
  kv_append(ctx, {at.kv_c, at.k_pe, at.slots, &at.cache});
  MlaDecodeParams params;
  params.q_latent = at.q.slice(2, 0, Step::kLatent);
  params.q_pe = at.q.slice(2, Step::kLatent, Step::kLatent + Step::kRope);
  params.cache = &at.cache;
  params.block_table = {step.table.data(), 2, 5, 5};
  params.out = at.out;
  params.schedule = &schedule;
  params.sm_scale = 0.07f;
  ctx.workspace->reserve(workspace_bytes(ctx, params));
  mla_decode(ctx, params);
}

PagedKvCache cache_at(void* data, Device device) {
  return PagedKvCache::view(data, {DType::bf16, Step::kLatent + Step::kRope},
                            {.num_blocks = Step::kBlocks, .block_size = Step::kBlock}, device);
}

/// The step by the reference backend.
std::vector<double> expected(const Step& step) {
  const Runtime reference({.backend = "reference", .num_threads = 1});
  const DecodeSchedule schedule =
      schedule_decode(step.query_start, step.seq_lens, reference.context().plan_target);
  run(reference, step,
      {step.q, step.kv_c, step.k_pe, step.slots, step.out, cache_at(step.cache.view().data, {})},
      schedule);
  return to_doubles(step.out);
}

class CudaDevice : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    runtime_ = std::make_unique<Runtime>(RuntimeOptions{
        .backend = "cuda", .isa = GetParam(), .num_threads = 1, .cuda_stream = stream_});
  }
  void TearDown() override {
    if (stream_) cudaStreamDestroy(stream_);
  }
  const OpContext& ctx() const { return *runtime_; }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Runtime> runtime_;
};
INSTANTIATE_TEST_SUITE_P(, CudaDevice, ::testing::Values("auto", "plain"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(CudaDevice, AStepRunsOnAStreamAndReplaysInAGraph) {
  Step step(1);
  OnDevice q(step.q), kv_c(step.kv_c), k_pe(step.k_pe), cache(step.cache);
  const OnDevice slots(step.slots), out(step.out);
  const Operands at{q, kv_c, k_pe, slots, out, cache_at(cache.data(), {Device::Type::cuda, 0})};
  {
    // The plan may go away before the device has read it.
    const DecodeSchedule schedule =
        schedule_decode(step.query_start, step.seq_lens, ctx().plan_target);
    run(ctx(), step, at, schedule);
  }
  check(cudaStreamSynchronize(stream()));
  const Tensor got = Tensor::zeros(DType::bf16, {2, Step::kHeads, Step::kLatent});
  out.get(got);
  EXPECT_TRUE(rows_close(expected(step), got, {1.2e-2, 1e-4}));

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  {
    const DecodeSchedule schedule =
        schedule_decode(step.query_start, step.seq_lens, ctx().plan_target);
    run(ctx(), step, at, schedule);
  }
  check(cudaStreamEndCapture(stream(), &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  for (std::uint64_t seed : {5, 9}) {
    const Step other(seed);
    q.set(other.q);
    kv_c.set(other.kv_c);
    k_pe.set(other.k_pe);
    cache.set(other.cache);
    check(cudaGraphLaunch(executable, stream()));
    check(cudaStreamSynchronize(stream()));
    out.get(got);
    EXPECT_TRUE(rows_close(expected(other), got, {1.2e-2, 1e-4})) << "seed " << seed;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_P(CudaDevice, PlansLongerThanOneUploadArrive) {
  // 300 requests of 40 blocks: 12600 words.
  constexpr std::int64_t kRequests = 300, kTable = 40, kBlock = 1, kWidth = 32;
  std::vector<std::int32_t> query_start{0}, seq_lens, table;
  for (std::int32_t r = 0; r < kRequests; ++r) {
    query_start.push_back(r + 1);
    seq_lens.push_back(1 + (r * 7) % static_cast<std::int32_t>(kTable));
    for (std::int32_t b = 0; b < kTable; ++b) table.push_back((r * 13 + b * 3) % 97);
  }
  const Tensor rows = Tensor::empty(DType::f32, {97, kWidth});
  const Tensor q = Tensor::empty(DType::f32, {kRequests, 1, kWidth});
  const Tensor host_out = Tensor::zeros(DType::f32, {kRequests, 1, kWidth});
  fill_normal(rows, 1);
  fill_normal(q, 2);
  const KvFormat format{DType::f32, kWidth};
  const KvCacheLayout layout{.num_blocks = 97, .block_size = kBlock};
  const auto decode = [&](const OpContext& context, const TensorView& queries, void* keys,
                          Device device, const TensorView& out) {
    const PagedKvCache cache = PagedKvCache::view(keys, format, layout, device);
    AttentionDecodeParams params;
    params.q = queries;
    params.kv = {&cache, &cache, {table.data(), kRequests, kTable, kTable}, 1};
    params.out = out;
    params.sm_scale = 0.2f;
    attention_decode_once(context, params, query_start, seq_lens);
  };
  const Runtime reference({.backend = "reference", .num_threads = 1});
  decode(reference, q, rows.view().data, {}, host_out);
  const std::vector<double> wanted = to_doubles(host_out);
  const OnDevice device_q(q), device_rows(rows), out(host_out);
  decode(ctx(), device_q, device_rows.data(), {Device::Type::cuda, 0}, out);
  check(cudaStreamSynchronize(stream()));
  out.get(host_out);
  EXPECT_TRUE(rows_close(wanted, host_out, {2e-5, 2e-6}));
}

TEST_P(CudaDevice, RefusesMemoryThatIsNotItsOwn) {
  const Tensor weight = Tensor::zeros(DType::f32, {8});
  const OnDevice device_weight(weight);
  TensorView elsewhere = device_weight;
  elsewhere.device.index = 1;
  const TensorView x = TensorView(device_weight).split(0, 1, 8);
  try {
    rms_norm(ctx(), {x, elsewhere, x});
    ADD_FAILURE() << "a view of another device was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_STREQ(error.what(),
                 "rms_norm: weight is on CUDA device 1; this context computes on CUDA device 0");
  }
}

}  // namespace
}  // namespace fovea::test
