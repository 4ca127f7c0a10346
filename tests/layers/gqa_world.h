// An attention layer with sequences, paged caches and a float64 twin. Every byte that a step must
// not use is NaN or a wrong id, and every step is checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"
#include "layers/gqa_weights.h"
#include "support/compare.h"

namespace fovea::test {

struct GqaOptions {
  GqaShape shape = {};
  DType dtype = DType::f32;
  AttentionVariant variant = {};
  std::int64_t rope_dim = 16;  ///< 0: nothing turns.
  RopePairing pairing = RopePairing::neox;
  MropeSections sections = {};
  RopeFusion rope_fusion = RopeFusion::automatic;
  LinearBackend linear = LinearBackend::automatic;
  std::string backend = "auto";
  std::int64_t block_size = 8;
  bool one_cache = false;  ///< Keys and values are columns of one.
  SplitPolicy split = {};
  std::int64_t padding_rows = 2;
  bool two_dim_positions = false;
  int threads = 2;
};

/// `tokens` more tokens of sequence `sequence`; drafts with `tree`.
struct GqaExtend {
  std::size_t sequence;
  std::int32_t tokens;
  std::vector<std::uint64_t> tree = {};
  /// Of token `i` behind a context of `context`.
  std::int64_t position(std::int32_t context, std::int32_t i) const {
    return context + (tree.empty() ? i : std::popcount(tree[static_cast<std::size_t>(i)]) - 1);
  }
};

class GqaWorld {
 public:
  /// Of the row norm. 16 bits: five roundings of the size of the row, of some eight on the way that
  /// partly cancel. f32: sums of some hundred terms.
  static double relative_limit(DType dtype) {
    return dtype == DType::f32 ? 1e-5 : 5 * unit_roundoff(dtype);
  }

  /// `lengths`: tokens that each sequence has in the end.
  GqaWorld(const GqaOptions& options, std::vector<std::int32_t> lengths, std::uint64_t seed = 1)
      : options_(options),
        dims_(options.shape.dims.validated()),
        weights_(options.shape, options.dtype, seed),
        runtime_({.backend = options.backend, .num_threads = options.threads}),
        layer_(dims_, weights_.views(), make_rotary(options),
               {.qk_norm = options.shape.qk_norm,
                .rope_fusion = options.rope_fusion,
                .linear = options.linear,
                .dtype = options.dtype}),
        lengths_(std::move(lengths)),
        done_(lengths_.size(), 0),
        outputs_(lengths_.size()) {
    // With several axes the test turns the oracle's rows pair by pair.
    for (oracle::GqaWeights& twin : weights_.twins()) {
      if (options.rope_dim > 0 && !options.sections.multi_axis()) twin.rotary = oracle_rotary();
    }
    make_sequences(seed);
    make_caches();
  }

  AttentionLayer& layer() { return layer_; }
  GqaLayerWeights& weights() { return weights_; }
  const GqaCache& cache() const { return cache_; }
  const OpContext& context() const { return runtime_.context(); }
  /// Layer outputs of a sequence so far, [done, H].
  const std::vector<double>& outputs(std::size_t sequence) const { return outputs_[sequence]; }

  /// Operands of a step, prepared but not run.
  struct Step {
    BatchPlan plan;
    std::vector<std::int32_t> table;
    Tensor slots;
    Tensor positions;
    Tensor lora_ids;
    std::unique_ptr<PaddedTensor> hidden;
    std::unique_ptr<PaddedTensor> out;
    AttentionStep step;
  };

  Step prepare(const std::vector<GqaExtend>& extends) const {
    Step s;
    s.plan = plan_of(extends);
    const std::int64_t rows = s.plan.num_actual_tokens + options_.padding_rows;
    const std::initializer_list<std::int64_t> shape{rows, dims_.hidden_size};
    s.hidden = std::make_unique<PaddedTensor>(options_.dtype, shape);
    s.out = std::make_unique<PaddedTensor>(options_.dtype, shape);
    const bool multi_axis = options_.sections.multi_axis();
    std::vector<double> slots(static_cast<std::size_t>(rows), 1e9), ids = slots;
    s.positions = Tensor::empty(DType::i32, {multi_axis ? 3 : 1, rows});
    assign(s.positions,
           std::vector<double>(static_cast<std::size_t>(multi_axis ? 3 * rows : rows), -77));
    std::int64_t row = 0;
    for (const GqaExtend& extend : extends) {
      const std::int32_t begin = done_[extend.sequence];
      assign(s.hidden->view().slice(0, row, row + extend.tokens),
             hidden_of(extend.sequence, begin, begin + extend.tokens));
      for (std::int32_t i = 0; i < extend.tokens; ++i, ++row) {
        slots[static_cast<std::size_t>(row)] =
            static_cast<double>(slot_of(extend.sequence, begin + i));
        ids[static_cast<std::size_t>(row)] = id_of(extend.sequence, begin + i);
        for (std::int64_t axis = 0; axis < s.positions.view().shape[0]; ++axis) {
          *s.positions.ptr<std::int32_t>({axis, row}) =
              static_cast<std::int32_t>(axis_position(axis, extend.position(begin, i)));
        }
      }
      append_table_row(s.table, extend);
    }
    s.slots = tensor_from(DType::i64, {rows}, slots);
    s.lora_ids = tensor_from(DType::i32, {rows}, ids);
    s.step.block_table = {s.table.data(), static_cast<std::int64_t>(extends.size()), table_width_,
                          table_width_};
    s.step.slot_mapping = s.slots;
    const bool flat = !multi_axis && !options_.two_dim_positions;
    if (options_.rope_dim > 0)
      s.step.positions = flat ? s.positions.view().select(0, 0) : s.positions.view();
    if (options_.shape.adapters > 0) s.step.lora_ids = s.lora_ids;
    return s;
  }

  BatchPlan plan_of(const std::vector<GqaExtend>& extends) const {
    SequenceBatch batch;
    batch.query_start_loc.push_back(0);
    const bool has_tree = std::any_of(extends.begin(), extends.end(),
                                      [](const GqaExtend& extend) { return !extend.tree.empty(); });
    for (const GqaExtend& extend : extends) {
      batch.query_start_loc.push_back(batch.query_start_loc.back() + extend.tokens);
      batch.seq_lens.push_back(done_[extend.sequence] + extend.tokens);
      for (std::int32_t i = 0; has_tree && i < extend.tokens; ++i) {
        batch.draft_tree.push_back(extend.tree.empty() ? 0
                                                       : extend.tree[static_cast<std::size_t>(i)]);
      }
    }
    PlanOptions options;
    options.split = options_.split;
    options.variant = options_.variant;
    options.context_plan = ContextPlanKind::paged;
    options.block_size = options_.block_size;
    return make_plan(batch, context().plan_target, options);
  }

  /// Runs a step in exactly the workspace that it asks for, all NaN, and checks its output rows,
  /// its padding rows and what it stored.
  void run(const std::vector<GqaExtend>& extends) {
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
    for (const GqaExtend& extend : extends) {
      done_[extend.sequence] += extend.tokens;
      accept(extend, s.out->view().slice(0, row, row + extend.tokens));
      row += extend.tokens;
    }
    for (double value : to_doubles(s.out->view().slice(0, row, s.out->view().shape[0]))) {
      EXPECT_EQ(value, 0);
    }
  }

  std::int64_t slot_of(std::size_t sequence, std::int32_t t) const {
    return blocks_[sequence][static_cast<std::size_t>(t / options_.block_size)] *
               options_.block_size +
           t % options_.block_size;
  }
  static TensorView stored_row(const PagedKvCache& cache, std::int64_t slot) {
    return TensorView::contiguous(cache.slot(slot), cache.format().dtype,
                                  {cache.format().row_elements});
  }

 private:
  static std::shared_ptr<const RotaryEmbedding> make_rotary(const GqaOptions& options) {
    if (options.rope_dim == 0) return nullptr;
    RopeConfig config;
    config.dim = options.rope_dim;
    config.max_position = 4096;
    config.pairing = options.pairing;
    config.sections = options.sections;
    return std::make_shared<const RotaryEmbedding>(config);
  }
  oracle::Rotary oracle_rotary() const {
    return oracle::rotary(options_.rope_dim, 10000, options_.pairing == RopePairing::interleaved);
  }
  void make_sequences(std::uint64_t seed) {
    std::int64_t longest = 0;
    num_blocks_ = 3;
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const Tensor hidden = Tensor::empty(options_.dtype, {lengths_[i], dims_.hidden_size});
      fill_normal(hidden, seed + 1000 + i);
      hidden_.push_back(to_doubles(hidden));
      longest = std::max(longest, blocks_for(lengths_[i]));
      num_blocks_ += blocks_for(lengths_[i]);
    }
    table_width_ = longest + 1;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks_));
    std::iota(ids.begin(), ids.end(), 0);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1],
                ids[static_cast<std::size_t>(random_below(7, i, static_cast<std::int64_t>(i)))]);
    }
    auto next = ids.begin();
    for (std::int32_t length : lengths_) {
      blocks_.emplace_back(next, next + blocks_for(length));
      next += blocks_for(length);
    }
  }
  PagedKvCache make_cache(std::int64_t row_elements) {
    const KvFormat format{.dtype = options_.dtype, .row_elements = row_elements};
    const KvCacheLayout layout{.num_blocks = num_blocks_,
                               .block_size = options_.block_size,
                               .block_stride = options_.block_size * format.row_bytes() + 64,
                               .storage_offset = 128};
    const std::int64_t bytes = PagedKvCache::required_bytes(format, layout);
    memory_.push_back(Tensor::empty(DType::u8, {bytes}));
    poison_bytes(memory_.back().view().data, bytes);
    return PagedKvCache::view(memory_.back().view().data, format, layout);
  }
  void make_caches() {
    if (options_.one_cache) {
      cache_ = GqaCache::columns_of(make_cache(dims_.k_size() + dims_.v_size()), dims_);
    } else {
      cache_ = {.k = make_cache(dims_.k_size()), .v = make_cache(dims_.v_size())};
    }
  }
  /// Blocks that no query sees have garbage ids, those before the window too.
  void append_table_row(std::vector<std::int32_t>& table, const GqaExtend& extend) const {
    const std::int32_t begin = done_[extend.sequence], total = begin + extend.tokens;
    std::int64_t first = 0;
    if (options_.variant.window_left >= 0) first = begin - options_.variant.window_left;
    if (options_.variant.attention_chunk > 0) {
      first = std::max(first,
                       begin / options_.variant.attention_chunk * options_.variant.attention_chunk);
    }
    const std::vector<std::int32_t>& blocks = blocks_[extend.sequence];
    for (std::int64_t i = 0; i < table_width_; ++i) {
      const bool needed = i * options_.block_size < total && (i + 1) * options_.block_size > first;
      table.push_back(needed ? blocks[static_cast<std::size_t>(i)] : -99);
    }
  }
  std::int64_t blocks_for(std::int32_t tokens) const {
    return (tokens + options_.block_size - 1) / options_.block_size;
  }
  std::span<const double> hidden_of(std::size_t sequence, std::int32_t begin,
                                    std::int32_t end) const {
    return std::span(hidden_[sequence])
        .subspan(static_cast<std::size_t>(begin * dims_.hidden_size),
                 static_cast<std::size_t>((end - begin) * dims_.hidden_size));
  }
  static std::int64_t axis_position(std::int64_t axis, std::int64_t position) {
    return axis == 0 ? position : axis == 1 ? position * 7 % 50 : position / 3;
  }
  int id_of(std::size_t sequence, std::int32_t t) const {
    return static_cast<int>(random_below(91 + sequence, static_cast<std::uint64_t>(t),
                                         options_.shape.adapters + 1)) -
           1;
  }
  static AttentionLimits limits_of(const BatchPlan& plan, const std::vector<GqaExtend>& extends) {
    return {.max_tokens = plan.num_actual_tokens,
            .max_num_seqs = static_cast<std::int64_t>(extends.size()),
            .max_seq_len = plan.max_seq_len,
            .max_decode_query_len = std::max(1, plan.decode.max_query_len)};
  }

  /// Turns heads of one token by its three positions.
  void rotate_by_axes(std::span<double> heads, std::int64_t count, std::int64_t position) const {
    const auto& pairs = options_.sections.pairs;
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < options_.rope_dim / 2; ++i) {
      std::int64_t axis = i < pairs[0] ? 0 : i < pairs[0] + pairs[1] ? 1 : 2;
      if (options_.sections.interleaved) {
        axis = i < 3 * pairs[static_cast<std::size_t>(i % 3)] ? i % 3 : 0;
      }
      positions.push_back(axis_position(axis, position));
    }
    oracle::rotate_pairs(heads, positions, count, oracle_rotary(), dims_.head_dim);
  }
  std::vector<double> expected_row(std::size_t sequence, std::int32_t t,
                                   std::int64_t position) const {
    const std::int64_t positions[] = {position};
    std::vector<double> row = oracle::gqa_rows(weights_.twin(id_of(sequence, t)),
                                               hidden_of(sequence, t, t + 1), positions);
    if (options_.sections.multi_axis()) {
      rotate_by_axes(std::span(row).first(static_cast<std::size_t>(dims_.k_size())),
                     dims_.num_kv_heads, position);
    }
    return row;
  }
  std::vector<double> expected_query(std::size_t sequence, std::int32_t t,
                                     std::int64_t position) const {
    const std::int64_t positions[] = {position};
    std::vector<double> q = oracle::gqa_queries(weights_.twin(id_of(sequence, t)),
                                                hidden_of(sequence, t, t + 1), positions);
    if (options_.sections.multi_axis()) rotate_by_axes(q, dims_.num_heads, position);
    return q;
  }

  /// `out`: the layer's rows of a sequence's newest tokens, already stored.
  void accept(const GqaExtend& extend, const TensorView& out) {
    const std::size_t i = extend.sequence;
    const std::int32_t end = done_[i], begin = end - extend.tokens;
    std::vector<double> q, k, v;
    for (std::int32_t t = 0; t < end; ++t) {
      const TensorView key = stored_row(cache_.k, slot_of(i, t));
      const TensorView value = stored_row(cache_.v, slot_of(i, t));
      if (t >= begin) {
        const std::int64_t position = extend.position(begin, t - begin);
        const std::vector<double> row = expected_row(i, t, position);
        const auto split = static_cast<std::size_t>(dims_.k_size());
        const RowTolerance tolerance{relative_limit(options_.dtype), 0};
        EXPECT_TRUE(rows_close(std::span(row).first(split), key, tolerance))
            << "key of sequence " << i << ", token " << t;
        EXPECT_TRUE(rows_close(std::span(row).subspan(split), value, tolerance))
            << "value of sequence " << i << ", token " << t;
        append(q, expected_query(i, t, position));
      }
      append(k, to_doubles(key));
      append(v, to_doubles(value));
    }
    const oracle::GqaWeights& base = weights_.twin(-1);
    const oracle::AttentionResult attended =
        oracle::attention({.num_queries = extend.tokens,
                           .num_keys = end,
                           .num_heads = dims_.num_heads,
                           .num_kv_heads = dims_.num_kv_heads,
                           .qk_dim = dims_.head_dim,
                           .v_dim = dims_.v_head_dim,
                           .sm_scale = base.sm_scale,
                           .causal = options_.variant.causal,
                           .window_left = options_.variant.window_left,
                           .attention_chunk = options_.variant.attention_chunk,
                           .soft_cap = options_.variant.soft_cap,
                           .sinks = base.sinks,
                           .draft_tree = extend.tree,
                           .q = q,
                           .k = k,
                           .v = v});
    std::vector<double> expected;
    for (std::int32_t t = begin; t < end; ++t) {
      const oracle::GqaWeights& twin = weights_.twin(id_of(i, t));
      const auto width = static_cast<std::size_t>(dims_.out_size());
      append(
          expected,
          oracle::linear(
              std::span(attended.out).subspan(static_cast<std::size_t>(t - begin) * width, width),
              twin.o_proj, twin.o_bias, dims_.out_size()));
    }
    EXPECT_TRUE(rows_close(expected, out, {relative_limit(options_.dtype), 0}))
        << "sequence " << i << ", tokens [" << begin << ", " << end << ")";
    append(outputs_[i], to_doubles(out));
  }
  static void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  GqaOptions options_;
  GqaDims dims_;
  GqaLayerWeights weights_;
  Runtime runtime_;
  AttentionLayer layer_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> done_;
  std::vector<std::vector<double>> hidden_;
  std::vector<std::vector<std::int32_t>> blocks_;
  std::vector<std::vector<double>> outputs_;
  std::int64_t table_width_ = 0;
  std::int64_t num_blocks_ = 0;
  std::vector<Tensor> memory_;
  GqaCache cache_;
};

}  // namespace fovea::test
