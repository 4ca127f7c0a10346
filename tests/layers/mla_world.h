// An MLA layer with sequences, a paged cache and a float64 twin. Every byte that a step must not
// use is NaN or a wrong id, and every step is checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/mla.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"
#include "layers/layer_weights.h"
#include "layers/mla_rules.h"
#include "layers/rows_difference.h"
#include "support/compare.h"

namespace fovea::test {

struct WorldOptions {
  LayerShape shape;
  DType dtype = DType::f32;
  DType cache_dtype = DType::u8;  ///< u8 stands for dtype.
  KvBOrder order = KvBOrder::per_head;
  MlaAbsorption absorption = MlaAbsorption::two_step;
  LinearBackend linear = LinearBackend::automatic;
  bool requantize_absorbed = false;
  double output_limit = 0;  ///< Of the row norm; 0: relative_limit() of dtype.
  std::string backend = "auto";
  AttentionVariant variant = {};
  std::int64_t block_size = 16;
  std::int64_t workspace_rows = 64;
  ContextPlanKind context_plan = ContextPlanKind::packed;
  SplitPolicy split = {};
  /// Every request still reads its prompt, and so is a prefill where the policy asks for it.
  bool all_prefilling = false;
  std::int64_t padding_rows = 2;
  bool two_dim_positions = false;
  bool rotates = true;
  RopePairing pairing = RopePairing::interleaved;
  std::optional<YarnScaling> yarn = {};  ///< Its mscale^2 goes into the softmax scale.
  int threads = 2;
  std::uint64_t block_seed = 1;  ///< Which blocks the sequences get.
};

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

class World {
 public:
  /// Of the row norm. 16 bits: four roundings of the size of the row, of some ten on the way that
  /// partly cancel. f32: sums of some hundred terms.
  static double relative_limit(DType dtype) {
    return dtype == DType::f32 ? 1e-5 : 4 * unit_roundoff(dtype);
  }

  /// `lengths`: tokens that each sequence has in the end.
  World(const WorldOptions& options, std::vector<std::int32_t> lengths, std::uint64_t seed = 1)
      : options_(options),
        weights_(options.shape, options.dtype, seed, options.order),
        rotary_(make_rotary(options)),
        runtime_({.backend = options.backend, .num_threads = options.threads}),
        layer_(dims_of(options), weights_.views(), rotary_,
               {.absorption = options.absorption,
                .linear = options.linear,
                .requantize_absorbed = options.requantize_absorbed}),
        lengths_(std::move(lengths)),
        done_(lengths_.size(), 0),
        outputs_(lengths_.size()) {
    set_oracle_rotary();
    make_sequences(seed);
    make_cache();
  }

  const MlaLayer& layer() const { return layer_; }
  MlaLayer& layer() { return layer_; }
  LayerWeights& weights() { return weights_; }
  const PagedKvCache& cache() const { return cache_; }
  const OpContext& context() const { return runtime_.context(); }
  std::int32_t done(std::size_t sequence) const { return done_[sequence]; }
  /// Layer outputs of a sequence so far, [done, H].
  const std::vector<double>& outputs(std::size_t sequence) const { return outputs_[sequence]; }
  /// Stored rows of a sequence so far, [done, L + R].
  std::vector<double> stored_rows(std::size_t sequence) const {
    std::vector<double> rows;
    for (std::int32_t t = 0; t < done_[sequence]; ++t) {
      const std::vector<double> row = to_doubles(stored_row(sequence, t));
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }
  std::span<const double> hidden_of(std::size_t sequence, std::int32_t begin,
                                    std::int32_t end) const {
    return std::span(hidden_[sequence])
        .subspan(static_cast<std::size_t>(begin * options_.shape.hidden),
                 static_cast<std::size_t>((end - begin) * options_.shape.hidden));
  }

  /// Operands of a step, prepared but not run.
  struct Step {
    BatchPlan plan;
    std::vector<std::int32_t> table;
    Tensor slots;
    Tensor positions;
    std::unique_ptr<PaddedTensor> hidden;
    std::unique_ptr<PaddedTensor> out;
    AttentionStep step;
  };

  Step prepare(const std::vector<Extend>& extends) const {
    Step s;
    s.plan = plan_of(extends);
    const std::int64_t actual = s.plan.num_actual_tokens;
    const std::int64_t rows = actual + options_.padding_rows;
    s.hidden = std::make_unique<PaddedTensor>(
        options_.dtype, std::initializer_list<std::int64_t>{rows, options_.shape.hidden});
    s.out = std::make_unique<PaddedTensor>(
        options_.dtype, std::initializer_list<std::int64_t>{rows, options_.shape.hidden});
    std::vector<double> slots(static_cast<std::size_t>(rows), 1e9);
    std::vector<double> positions(static_cast<std::size_t>(rows), -77);
    std::int64_t row = 0;
    for (const Extend& extend : extends) {
      const std::int32_t begin = done_[extend.sequence];
      assign(s.hidden->view().slice(0, row, row + extend.tokens),
             hidden_of(extend.sequence, begin, begin + extend.tokens));
      for (std::int32_t t = begin; t < begin + extend.tokens; ++t, ++row) {
        slots[static_cast<std::size_t>(row)] = static_cast<double>(slot_of(extend.sequence, t));
        positions[static_cast<std::size_t>(row)] = extend.position(begin, t - begin);
      }
    }
    s.slots = tensor_from(DType::i64, {rows}, slots);
    s.positions = tensor_from(DType::i32, {rows}, positions);
    const auto requests = static_cast<std::int64_t>(extends.size());
    for (const Extend& extend : extends) {
      const std::vector<std::int32_t>& blocks = blocks_[extend.sequence];
      const std::int32_t context = done_[extend.sequence], total = context + extend.tokens;
      // What lies before the first query's window or chunk may be gone.
      const AttentionVariant& variant = options_.variant;
      std::int64_t first = variant.window_left >= 0 ? context - variant.window_left : 0;
      if (variant.attention_chunk > 0) {
        first = std::max(first, context / variant.attention_chunk * variant.attention_chunk);
      }
      for (std::int64_t i = 0; i < table_width_; ++i) {
        const bool needed =
            i * options_.block_size < total && (i + 1) * options_.block_size > first;
        s.table.push_back(needed ? blocks[static_cast<std::size_t>(i)] : -99);
      }
    }
    s.step.block_table = {s.table.data(), requests, table_width_, table_width_};
    s.step.slot_mapping = s.slots;
    if (options_.rotates) s.step.positions = s.positions;
    if (options_.two_dim_positions) s.step.positions = s.positions.view().split(0, 1, rows);
    return s;
  }

  BatchPlan plan_of(const std::vector<Extend>& extends) const {
    SequenceBatch batch;
    batch.query_start_loc.push_back(0);
    for (const Extend& extend : extends) {
      batch.query_start_loc.push_back(batch.query_start_loc.back() + extend.tokens);
      batch.seq_lens.push_back(done_[extend.sequence] + extend.tokens);
      if (options_.all_prefilling) batch.is_prefilling.push_back(1);
    }
    if (std::any_of(extends.begin(), extends.end(),
                    [](const Extend& e) { return !e.tree.empty(); })) {
      for (const Extend& extend : extends) {
        batch.draft_tree.insert(batch.draft_tree.end(), extend.tree.begin(), extend.tree.end());
        batch.draft_tree.resize(batch.draft_tree.size() + static_cast<std::size_t>(extend.tokens) -
                                extend.tree.size());
      }
    }
    PlanOptions options;
    options.split = options_.split;
    options.variant = options_.variant;
    options.context_plan = options_.context_plan;
    options.workspace_rows = options_.workspace_rows;
    options.block_size = options_.block_size;
    return make_plan(batch, context().plan_target, options);
  }

  /// Runs a step in exactly the workspace that it asks for, all NaN, and checks its output rows,
  /// its padding rows and what it stored.
  void run(const std::vector<Extend>& extends) {
    Step s = prepare(extends);
    s.step.plan = &s.plan;
    const std::int64_t bytes = layer_.workspace_bytes(context(), s.plan);
    OpContext ctx = context();
    Workspace workspace;
    workspace.reserve(bytes);
    poison(workspace);
    ctx.workspace = &workspace;
    layer_(ctx, *s.hidden, *s.out, s.step, cache_);
    EXPECT_EQ(workspace.peak(), bytes);
    EXPECT_LE(bytes, layer_.workspace_bytes(ctx, limits_of(s.plan, extends)));
    EXPECT_TRUE(s.out->padding_untouched());

    std::int64_t row = 0;
    for (const Extend& extend : extends) {
      done_[extend.sequence] += extend.tokens;
      accept(extend, s.out->view().slice(0, row, row + extend.tokens));
      row += extend.tokens;
    }
    for (double value : to_doubles(s.out->view().slice(0, row, s.out->view().shape[0]))) {
      EXPECT_EQ(value, 0);
    }
  }

  /// Whole prompts of all sequences but `keep` tokens, in one step.
  void prefill_all_but(std::int32_t keep) {
    std::vector<Extend> extends;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      if (lengths_[i] > keep) extends.push_back({i, lengths_[i] - keep});
    }
    run(extends);
  }

 private:
  static MlaDims dims_of(const WorldOptions& options) {
    MlaDims dims = options.shape.dims();
    if (options.yarn) {
      const double mscale = yarn_mscale(options.yarn->factor, options.yarn->mscale_all_dim);
      dims.sm_scale *= static_cast<float>(mscale * mscale);
    }
    return dims;
  }
  static std::shared_ptr<const RotaryEmbedding> make_rotary(const WorldOptions& options) {
    if (!options.rotates) return nullptr;
    RopeConfig config;
    config.dim = options.shape.rope;
    config.max_position = 4096;
    config.pairing = options.pairing;
    if (options.yarn) config.scaling = *options.yarn;
    return std::make_shared<const RotaryEmbedding>(config);
  }
  void set_oracle_rotary() {
    const std::int64_t R = options_.shape.rope;
    const bool interleaved = options_.pairing == RopePairing::interleaved;
    oracle::MlaWeights& twin = weights_.oracle();
    twin.rotary = oracle::rotary(R, 10000, interleaved);
    if (!options_.yarn) return;
    const YarnScaling& yarn = *options_.yarn;
    twin.rotary = oracle::rotary_yarn(
        R, 10000, interleaved,
        {.factor = yarn.factor,
         .original_max_position = static_cast<double>(yarn.original_max_position),
         .beta_fast = yarn.beta_fast,
         .beta_slow = yarn.beta_slow,
         .mscale = yarn.mscale,
         .mscale_all_dim = yarn.mscale_all_dim});
    twin.sm_scale *= std::pow(oracle::yarn_mscale(yarn.factor, yarn.mscale_all_dim), 2);
  }
  void make_sequences(std::uint64_t seed) {
    std::int64_t num_blocks = 3, longest = 0;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const Tensor hidden = Tensor::empty(options_.dtype, {lengths_[i], options_.shape.hidden});
      fill_normal(hidden, seed + 1000 + i);
      hidden_.push_back(to_doubles(hidden));
      longest = std::max<std::int64_t>(longest, blocks_for(lengths_[i]));
      num_blocks += blocks_for(lengths_[i]);
    }
    table_width_ = longest + 1;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
    std::iota(ids.begin(), ids.end(), 0);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<std::size_t>(random_below(
                                options_.block_seed, i, static_cast<std::int64_t>(i)))]);
    }
    auto next = ids.begin();
    for (std::int32_t length : lengths_) {
      const auto count = static_cast<std::ptrdiff_t>(blocks_for(length));
      blocks_.emplace_back(next, next + count);
      next += count;
    }
    num_blocks_ = num_blocks;
  }
  void make_cache() {
    const KvFormat format{
        .dtype = options_.cache_dtype == DType::u8 ? options_.dtype : options_.cache_dtype,
        .row_elements = options_.shape.latent + options_.shape.rope};
    const KvCacheLayout layout{.num_blocks = num_blocks_,
                               .block_size = options_.block_size,
                               .block_stride = options_.block_size * format.row_bytes() + 64,
                               .storage_offset = 128};
    const std::int64_t bytes = PagedKvCache::required_bytes(format, layout);
    cache_memory_ = Tensor::empty(DType::u8, {bytes});
    poison_bytes(cache_memory_.view().data, bytes);
    cache_ = PagedKvCache::view(cache_memory_.view().data, format, layout);
  }
  std::int64_t blocks_for(std::int32_t tokens) const {
    return (tokens + options_.block_size - 1) / options_.block_size;
  }
  std::int64_t slot_of(std::size_t sequence, std::int32_t t) const {
    return blocks_[sequence][static_cast<std::size_t>(t / options_.block_size)] *
               options_.block_size +
           t % options_.block_size;
  }
  TensorView stored_row(std::size_t sequence, std::int32_t t) const {
    return TensorView::contiguous(cache_.slot(slot_of(sequence, t)), cache_.format().dtype,
                                  {cache_.format().row_elements});
  }
  static AttentionLimits limits_of(const BatchPlan& plan, const std::vector<Extend>& extends) {
    return {.max_tokens = plan.num_actual_tokens,
            .max_num_seqs = static_cast<std::int64_t>(extends.size()),
            .workspace_rows = plan.peak_context_rows,
            .max_seq_len = plan.max_seq_len,
            .max_decode_query_len = std::max(1, plan.decode.max_query_len)};
  }

  /// `out`: the layer's rows of a sequence's newest tokens, already stored.
  void accept(const Extend& extend, const TensorView& out) {
    const std::size_t i = extend.sequence;
    const std::int32_t end = done_[i], begin = end - extend.tokens;
    std::vector<std::int64_t> positions;
    for (std::int32_t t = begin; t < end; ++t) {
      positions.push_back(options_.rotates ? extend.position(begin, t - begin) : 0);
    }
    const std::span<const double> hidden = hidden_of(i, begin, end);
    const std::vector<double> fresh = oracle::mla_latent_rows(weights_.oracle(), hidden, positions);
    std::vector<double> rows = stored_rows(i);
    const auto row_elements = static_cast<std::size_t>(cache_.format().row_elements);
    for (std::int32_t t = begin; t < end; ++t) {
      const std::span<const double> expected = std::span(fresh).subspan(
          static_cast<std::size_t>(t - begin) * row_elements, row_elements);
      EXPECT_TRUE(
          rows_close(expected, stored_row(i, t),
                     {relative_limit(options_.dtype) + relative_limit(cache_.format().dtype), 0}))
          << "stored row of sequence " << i << ", token " << t;
    }
    // New tokens attend to each other as they were before they were stored.
    if (cache_.format().dtype != options_.dtype) {
      std::copy(fresh.begin(), fresh.end(),
                rows.begin() +
                    static_cast<std::ptrdiff_t>(begin) * static_cast<std::ptrdiff_t>(row_elements));
    }
    const bool plain =
        options_.variant == AttentionVariant{} && !options_.shape.sinks && extend.tree.empty();
    const std::vector<double> expected =
        plain ? oracle::mla_layer(
                    weights_.oracle(), hidden, positions, rows,
                    extend.tokens > 4 ? oracle::MlaForm::expanded : oracle::MlaForm::absorbed)
              : test::mla_layer_by_rules(weights_.oracle(),
                                         {options_.variant, weights_.sinks(), extend.tree}, hidden,
                                         positions, rows);
    const double limit =
        options_.output_limit > 0 ? options_.output_limit : relative_limit(options_.dtype);
    EXPECT_TRUE(rows_close(expected, out, {limit, 0}))
        << "sequence " << i << ", tokens [" << begin << ", " << end << ")";
    const std::vector<double> values = to_doubles(out);
    outputs_[i].insert(outputs_[i].end(), values.begin(), values.end());
  }

  WorldOptions options_;
  LayerWeights weights_;
  std::shared_ptr<const RotaryEmbedding> rotary_;
  Runtime runtime_;
  MlaLayer layer_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> done_;
  std::vector<std::vector<double>> hidden_;
  std::vector<std::vector<std::int32_t>> blocks_;
  std::vector<std::vector<double>> outputs_;
  std::int64_t table_width_ = 0;
  std::int64_t num_blocks_ = 0;
  Tensor cache_memory_;
  PagedKvCache cache_;
};

}  // namespace fovea::test
