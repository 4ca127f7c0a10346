// One sequence through one attention layer of either kind, in steps of any sizes, over a cache
// whose blocks are shuffled and whose unowned bytes are NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "fovea/attention.h"
#include "fovea/mla.h"
#include "fovea/runtime.h"

namespace fovea::test {

struct SequenceOptions {
  std::int64_t block_size = 4;
  /// Context rows of a chunk: fewer than the context gives several chunks.
  std::int64_t workspace_rows = 1 << 16;
  AttentionVariant variant = {};
};

class SequenceRunner {
 public:
  using Options = SequenceOptions;

  SequenceRunner(const Runtime& runtime, const MlaLayer& layer, std::int64_t max_tokens,
                 const Options& options = {})
      : SequenceRunner(runtime, layer.dtype(), layer.dims().latent_dim(), max_tokens, options) {
    attend_ = [this, &layer](const TensorView& hidden, const TensorView& out,
                             const AttentionStep& step) {
      const OpContext& ctx = runtime_.context();
      ctx.workspace->reserve(layer.workspace_bytes(ctx, *step.plan));
      layer(ctx, hidden, out, step, cache_);
    };
  }
  /// Keys and values are columns of one cache.
  SequenceRunner(const Runtime& runtime, const AttentionLayer& layer, std::int64_t max_tokens,
                 const Options& options = {})
      : SequenceRunner(runtime, layer.dtype(), layer.dims().k_size() + layer.dims().v_size(),
                       max_tokens, options) {
    context_plan_ = ContextPlanKind::paged;
    attend_ = [this, &layer](const TensorView& hidden, const TensorView& out,
                             const AttentionStep& step) {
      const OpContext& ctx = runtime_.context();
      ctx.workspace->reserve(layer.workspace_bytes(ctx, *step.plan));
      layer(ctx, hidden, out, step, GqaCache::columns_of(cache_, layer.dims()));
    };
  }
  SequenceRunner(const SequenceRunner&) = delete;
  SequenceRunner& operator=(const SequenceRunner&) = delete;

  /// The next hidden.shape[0] tokens; `out` has hidden's shape. Returns the step's context chunks.
  std::size_t step(const TensorView& hidden, const TensorView& out) {
    const std::int64_t tokens = hidden.shape[0];
    SequenceBatch batch;
    batch.query_start_loc = {0, static_cast<std::int32_t>(tokens)};
    batch.seq_lens = {static_cast<std::int32_t>(length_ + tokens)};
    PlanOptions plan_options;
    plan_options.block_size = options_.block_size;
    plan_options.workspace_rows = options_.workspace_rows;
    plan_options.variant = options_.variant;
    plan_options.context_plan = context_plan_;
    const BatchPlan plan = make_plan(batch, runtime_.context().plan_target, plan_options);

    std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
    std::iota(positions.begin(), positions.end(), length_);
    std::vector<std::int64_t> slots;
    for (const std::int64_t position : positions) {
      const auto block = static_cast<std::size_t>(position / options_.block_size);
      slots.push_back(table_[block] * options_.block_size + position % options_.block_size);
    }
    AttentionStep step;
    step.plan = &plan;
    step.block_table = {table_.data(), 1, static_cast<std::int64_t>(table_.size()),
                        static_cast<std::int64_t>(table_.size())};
    step.slot_mapping = TensorView::of(slots.data(), {tokens});
    step.positions = TensorView::of(positions.data(), {tokens});
    attend_(hidden, out, step);
    length_ += tokens;
    return plan.chunks.size();
  }

  /// Steps of the given sizes over the rows of `hidden`. Returns the most chunks of a step.
  std::size_t run(const TensorView& hidden, const TensorView& out,
                  std::span<const std::int64_t> sizes) {
    std::size_t chunks = 0;
    std::int64_t begin = 0;
    for (const std::int64_t size : sizes) {
      chunks = std::max(
          chunks, step(hidden.slice(0, begin, begin + size), out.slice(0, begin, begin + size)));
      begin += size;
    }
    return chunks;
  }

  /// The stored row of a token.
  TensorView stored_row(std::int64_t position) const {
    const auto block = static_cast<std::size_t>(position / options_.block_size);
    return TensorView::contiguous(cache_.row(table_[block], position % options_.block_size),
                                  cache_.format().dtype, {cache_.format().row_elements});
  }

 private:
  SequenceRunner(const Runtime& runtime, DType dtype, std::int64_t row_elements,
                 std::int64_t max_tokens, const Options& options)
      : runtime_(runtime), options_(options) {
    const std::int64_t blocks = (max_tokens + options.block_size - 1) / options.block_size;
    cache_ = PagedKvCache::allocate({dtype, row_elements},
                                    {.num_blocks = blocks + 1, .block_size = options.block_size});
    for (std::int64_t slot = 0; slot < cache_.num_slots(); ++slot) {
      std::memset(cache_.slot(slot), 0xff, static_cast<std::size_t>(cache_.format().row_bytes()));
    }
    table_.resize(static_cast<std::size_t>(blocks));
    std::iota(table_.begin(), table_.end(), 1);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(5));
    // Garbage behind the blocks in use: a table's tail is never read.
    table_.push_back(1 << 30);
  }

  const Runtime& runtime_;
  Options options_;
  ContextPlanKind context_plan_ = ContextPlanKind::packed;
  std::function<void(const TensorView&, const TensorView&, const AttentionStep&)> attend_;
  PagedKvCache cache_;
  std::vector<std::int32_t> table_;
  std::int64_t length_ = 0;
};

}  // namespace fovea::test
