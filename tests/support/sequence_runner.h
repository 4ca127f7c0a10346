// One sequence through one MLA layer, in steps of any sizes, over a cache whose blocks are shuffled
// and whose unowned bytes are NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "fovea/mla.h"
#include "fovea/runtime.h"

namespace fovea::test {

struct SequenceOptions {
  std::int64_t block_size = 4;
  /// Context rows of a chunk: fewer than the context gives several chunks.
  std::int64_t workspace_rows = 1 << 16;
};

class SequenceRunner {
 public:
  using Options = SequenceOptions;

  SequenceRunner(const Runtime& runtime, const MlaLayer& layer, std::int64_t max_tokens,
                 const Options& options = {})
      : runtime_(runtime), layer_(layer), options_(options) {
    const std::int64_t blocks = (max_tokens + options.block_size - 1) / options.block_size;
    cache_ = PagedKvCache::allocate({layer.dtype(), layer.dims().latent_dim()},
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

  /// The next hidden.shape[0] tokens; `out` has hidden's shape. Returns the step's context chunks.
  std::size_t step(const TensorView& hidden, const TensorView& out) {
    const std::int64_t tokens = hidden.shape[0];
    SequenceBatch batch;
    batch.query_start_loc = {0, static_cast<std::int32_t>(tokens)};
    batch.seq_lens = {static_cast<std::int32_t>(length_ + tokens)};
    PlanOptions plan_options;
    plan_options.block_size = options_.block_size;
    plan_options.workspace_rows = options_.workspace_rows;
    const OpContext& ctx = runtime_.context();
    const BatchPlan plan = make_plan(batch, ctx.plan_target, plan_options);

    std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
    std::iota(positions.begin(), positions.end(), length_);
    std::vector<std::int64_t> slots;
    for (const std::int64_t position : positions) {
      const auto block = static_cast<std::size_t>(position / options_.block_size);
      slots.push_back(table_[block] * options_.block_size + position % options_.block_size);
    }
    MlaStep step;
    step.plan = &plan;
    step.block_table = {table_.data(), 1, static_cast<std::int64_t>(table_.size()),
                        static_cast<std::int64_t>(table_.size())};
    step.slot_mapping = TensorView::of(slots.data(), {tokens});
    step.positions = TensorView::of(positions.data(), {tokens});
    ctx.workspace->reserve(layer_.workspace_bytes(ctx, plan));
    layer_(ctx, hidden, out, step, cache_);
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
                                  layer_.dtype(), {layer_.dims().latent_dim()});
  }

 private:
  const Runtime& runtime_;
  const MlaLayer& layer_;
  Options options_;
  PagedKvCache cache_;
  std::vector<std::int32_t> table_;
  std::int64_t length_ = 0;
};

}  // namespace fovea::test
