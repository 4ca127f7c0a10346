// Sequences with hidden states and blocks of a paged cache, and steps over them: what the layers'
// tests share. Every byte that a step must not use is NaN or a wrong id.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "fovea/attention_step.h"
#include "fovea/linear.h"
#include "fovea/plan.h"
#include "support/compare.h"

namespace fovea::test {

/// `tokens` more tokens of sequence `sequence`; drafts with `tree`.
struct Extend {
  std::size_t sequence;
  std::int32_t tokens;
  std::vector<std::uint64_t> tree = {};
  /// Of token `i` behind a context of `context`.
  std::int32_t position(std::int32_t context, std::int32_t i) const {
    return context + (tree.empty() ? i : std::popcount(tree[static_cast<std::size_t>(i)]) - 1);
  }
};

/// Operands of a step. Positions are the layer's own matter.
struct StepOperands {
  BatchPlan plan;
  std::vector<std::int32_t> table;
  Tensor slots;
  Tensor positions;
  std::unique_ptr<PaddedTensor> hidden;
  std::unique_ptr<PaddedTensor> out;
  AttentionStep step;

  std::int64_t rows() const { return hidden->view().shape[0]; }
};

class Sequences {
 public:
  struct Options {
    DType dtype;
    std::int64_t hidden_size;
    std::int64_t block_size;
    std::uint64_t seed;
    std::uint64_t block_seed;  ///< Which blocks the sequences get.
  };

  /// `lengths`: tokens that each sequence has in the end.
  Sequences(std::vector<std::int32_t> lengths, const Options& options)
      : options_(options),
        lengths_(std::move(lengths)),
        done_(lengths_.size(), 0),
        outputs_(lengths_.size()) {
    std::int64_t longest = 0;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const Tensor hidden = Tensor::empty(options_.dtype, {lengths_[i], options_.hidden_size});
      fill_normal(hidden, options_.seed + 1000 + i);
      hidden_.push_back(to_doubles(hidden));
      longest = std::max(longest, blocks_for(lengths_[i]));
      num_blocks_ += blocks_for(lengths_[i]);
    }
    table_width_ = longest + 1;
    give_blocks();
  }

  const std::vector<std::int32_t>& lengths() const { return lengths_; }
  std::int32_t done(std::size_t sequence) const { return done_[sequence]; }
  std::int64_t num_blocks() const { return num_blocks_; }
  /// Layer outputs of a sequence so far, [done, H].
  const std::vector<double>& outputs(std::size_t sequence) const { return outputs_[sequence]; }
  std::span<const double> hidden_of(std::size_t sequence, std::int32_t begin,
                                    std::int32_t end) const {
    return std::span(hidden_[sequence])
        .subspan(static_cast<std::size_t>(begin * options_.hidden_size),
                 static_cast<std::size_t>((end - begin) * options_.hidden_size));
  }
  std::int64_t slot_of(std::size_t sequence, std::int32_t t) const {
    return blocks_[sequence][static_cast<std::size_t>(t / options_.block_size)] *
               options_.block_size +
           t % options_.block_size;
  }

  SequenceBatch batch(const std::vector<Extend>& extends) const {
    SequenceBatch batch;
    batch.query_start_loc.push_back(0);
    const bool has_tree = std::any_of(extends.begin(), extends.end(),
                                      [](const Extend& extend) { return !extend.tree.empty(); });
    for (const Extend& extend : extends) {
      batch.query_start_loc.push_back(batch.query_start_loc.back() + extend.tokens);
      batch.seq_lens.push_back(done_[extend.sequence] + extend.tokens);
      for (std::int32_t i = 0; has_tree && i < extend.tokens; ++i) {
        batch.draft_tree.push_back(extend.tree.empty() ? 0
                                                       : extend.tree[static_cast<std::size_t>(i)]);
      }
    }
    return batch;
  }

  /// All but the positions and the plan's place in the step.
  StepOperands operands(const std::vector<Extend>& extends, BatchPlan plan,
                        std::int64_t padding_rows) const {
    StepOperands s;
    s.plan = std::move(plan);
    const std::int64_t rows = s.plan.num_actual_tokens + padding_rows;
    const std::initializer_list<std::int64_t> shape{rows, options_.hidden_size};
    s.hidden = std::make_unique<PaddedTensor>(options_.dtype, shape);
    s.out = std::make_unique<PaddedTensor>(options_.dtype, shape);
    std::vector<double> slots(static_cast<std::size_t>(rows), 1e9);
    std::int64_t row = 0;
    for (const Extend& extend : extends) {
      const std::int32_t begin = done_[extend.sequence];
      assign(s.hidden->view().slice(0, row, row + extend.tokens),
             hidden_of(extend.sequence, begin, begin + extend.tokens));
      for (std::int32_t t = begin; t < begin + extend.tokens; ++t, ++row) {
        slots[static_cast<std::size_t>(row)] = static_cast<double>(slot_of(extend.sequence, t));
      }
      append_table_row(s.table, extend, s.plan.variant);
    }
    s.slots = tensor_from(DType::i64, {rows}, slots);
    s.step.block_table = {s.table.data(), static_cast<std::int64_t>(extends.size()), table_width_,
                          table_width_};
    s.step.slot_mapping = s.slots;
    return s;
  }

  /// After a step: accept(extend, its rows of `out`) for each, with its tokens done; rows behind
  /// them must be zero.
  template <class Accept>
  void advance(const std::vector<Extend>& extends, const TensorView& out, Accept&& accept) {
    std::int64_t row = 0;
    for (const Extend& extend : extends) {
      done_[extend.sequence] += extend.tokens;
      const TensorView rows = out.slice(0, row, row + extend.tokens);
      accept(extend, rows);
      const std::vector<double> values = to_doubles(rows);
      std::vector<double>& outputs = outputs_[extend.sequence];
      outputs.insert(outputs.end(), values.begin(), values.end());
      row += extend.tokens;
    }
    for (double value : to_doubles(out.slice(0, row, out.shape[0]))) EXPECT_EQ(value, 0);
  }

 private:
  void give_blocks() {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks_));
    std::iota(ids.begin(), ids.end(), 0);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<std::size_t>(random_below(
                                options_.block_seed, i, static_cast<std::int64_t>(i)))]);
    }
    auto next = ids.begin();
    for (std::int32_t length : lengths_) {
      blocks_.emplace_back(next, next + blocks_for(length));
      next += blocks_for(length);
    }
  }
  std::int64_t blocks_for(std::int32_t tokens) const {
    return (tokens + options_.block_size - 1) / options_.block_size;
  }
  /// Blocks that no query sees have garbage ids: what lies before the first query's window or chunk
  /// may be gone.
  void append_table_row(std::vector<std::int32_t>& table, const Extend& extend,
                        const AttentionVariant& variant) const {
    const std::int32_t begin = done_[extend.sequence], total = begin + extend.tokens;
    std::int64_t first = variant.window_left >= 0 ? begin - variant.window_left : 0;
    if (variant.attention_chunk > 0) {
      first = std::max(first, begin / variant.attention_chunk * variant.attention_chunk);
    }
    const std::vector<std::int32_t>& blocks = blocks_[extend.sequence];
    for (std::int64_t i = 0; i < table_width_; ++i) {
      const bool needed = i * options_.block_size < total && (i + 1) * options_.block_size > first;
      table.push_back(needed ? blocks[static_cast<std::size_t>(i)] : -99);
    }
  }

  Options options_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> done_;
  std::vector<std::vector<double>> hidden_;
  std::vector<std::vector<std::int32_t>> blocks_;
  std::vector<std::vector<double>> outputs_;
  std::int64_t table_width_ = 0;
  std::int64_t num_blocks_ = 3;  ///< Some that nobody owns.
};

inline TensorView stored_row(const PagedKvCache& cache, std::int64_t slot) {
  return TensorView::contiguous(cache.slot(slot), cache.format().dtype,
                                {cache.format().row_elements});
}

inline bool computes_on_host(const OpContext& ctx) { return ctx.memory.device == Device{}; }

/// Products of a CPU can be chosen; those of a GPU are what they are.
inline LinearBackend linear_for(const OpContext& ctx, LinearBackend asked) {
  return computes_on_host(ctx) ? asked : LinearBackend::automatic;
}

/// A cache in `memory`, which it sets: all NaN, with gaps between blocks and before the first.
inline PagedKvCache make_cache(const KvFormat& format, std::int64_t num_blocks,
                               std::int64_t block_size, Tensor& memory) {
  const KvCacheLayout layout{.num_blocks = num_blocks,
                             .block_size = block_size,
                             .block_stride = block_size * format.row_bytes() + 64,
                             .storage_offset = 128};
  const std::int64_t bytes = PagedKvCache::required_bytes(format, layout);
  memory = Tensor::empty(DType::u8, {bytes});
  poison_bytes(memory.view().data, bytes);
  return PagedKvCache::view(memory.view().data, format, layout);
}

/// Runs the step in exactly the workspace that it asks for, all NaN.
template <class Layer, class Cache>
void run_step(const Layer& layer, OpContext ctx, StepOperands& s, const Cache& cache) {
  s.step.plan = &s.plan;
  const std::int64_t bytes = layer.workspace_bytes(ctx, s.plan);
  Workspace workspace(ctx.memory);
  workspace.reserve(bytes);
  poison(workspace);
  ctx.workspace = &workspace;
  layer(ctx, *s.hidden, *s.out, s.step, cache);
  if (computes_on_host(ctx)) {
    EXPECT_EQ(workspace.peak(), bytes);
  } else {
    EXPECT_LE(workspace.peak(), bytes);  // A GPU's images of block tables depend on the block size.
  }
  const AttentionLimits limits{.max_tokens = s.plan.num_actual_tokens,
                               .max_num_seqs = s.step.block_table.requests,
                               .workspace_rows = s.plan.peak_context_rows,
                               .max_seq_len = s.plan.max_seq_len,
                               .max_decode_query_len = std::max(1, s.plan.decode.max_query_len)};
  EXPECT_LE(bytes, layer.workspace_bytes(ctx, limits));
  EXPECT_TRUE(s.out->padding_untouched());
}

}  // namespace fovea::test
