// An attention layer with sequences, paged caches and a float64 twin. Every byte that a step must
// not use is NaN or a wrong id, and every step is checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/stored_row_error.h"
#include "fovea/attention.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"
#include "layers/gqa_weights.h"
#include "layers/sequences.h"
#include "support/compare.h"
#include "support/oracle_format.h"

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
  std::string kv_format = "";  ///< Empty: that of dtype.
  float kv_scale = 1;          ///< Of keys in formats with one scale; values have twice that.
  SplitPolicy split = {};
  std::int64_t padding_rows = 2;
  bool two_dim_positions = false;
  int threads = 2;
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
                .linear = linear_for(context(), options.linear),
                .dtype = options.dtype,
                .memory = context().memory}),
        sequences_(std::move(lengths), {.dtype = options.dtype,
                                        .hidden_size = dims_.hidden_size,
                                        .block_size = options.block_size,
                                        .seed = seed,
                                        .block_seed = 7}) {
    // With several axes the test turns the oracle's rows pair by pair.
    for (oracle::GqaWeights& twin : weights_.twins()) {
      if (options.rope_dim > 0 && !options.sections.multi_axis()) twin.rotary = oracle_rotary();
    }
    make_caches();
  }

  AttentionLayer& layer() { return layer_; }
  GqaLayerWeights& weights() { return weights_; }
  const GqaCache& cache() const { return cache_; }
  const OpContext& context() const { return runtime_.context(); }
  /// Layer outputs of a sequence so far, [done, H].
  const std::vector<double>& outputs(std::size_t sequence) const {
    return sequences_.outputs(sequence);
  }

  /// Operands of a step, prepared but not run.
  struct Step : StepOperands {
    Tensor lora_ids;
  };

  Step prepare(const std::vector<Extend>& extends) const {
    Step s{sequences_.operands(extends, plan_of(extends), options_.padding_rows), {}};
    const std::int64_t rows = s.rows();
    const std::int64_t axes = options_.sections.multi_axis() ? 3 : 1;
    s.positions = Tensor::empty(DType::i32, {axes, rows});
    assign(s.positions, std::vector<double>(static_cast<std::size_t>(axes * rows), -77));
    std::vector<double> ids(static_cast<std::size_t>(rows), 1e9);
    std::int64_t row = 0;
    for (const Extend& extend : extends) {
      const std::int32_t begin = sequences_.done(extend.sequence);
      for (std::int32_t i = 0; i < extend.tokens; ++i, ++row) {
        ids[static_cast<std::size_t>(row)] = id_of(extend.sequence, begin + i);
        for (std::int64_t axis = 0; axis < axes; ++axis) {
          *s.positions.ptr<std::int32_t>({axis, row}) =
              static_cast<std::int32_t>(axis_position(axis, extend.position(begin, i)));
        }
      }
    }
    s.lora_ids = tensor_from(DType::i32, {rows}, ids);
    const bool flat = axes == 1 && !options_.two_dim_positions;
    if (options_.rope_dim > 0)
      s.step.positions = flat ? s.positions.view().select(0, 0) : s.positions.view();
    if (options_.shape.adapters > 0) s.step.lora_ids = s.lora_ids;
    return s;
  }

  BatchPlan plan_of(const std::vector<Extend>& extends) const {
    PlanOptions options;
    options.split = options_.split;
    options.variant = options_.variant;
    options.context_plan = ContextPlanKind::paged;
    options.block_size = options_.block_size;
    return make_plan(sequences_.batch(extends), context().plan_target, options);
  }

  /// Runs a step in exactly the workspace that it asks for, all NaN, and checks its output rows,
  /// its padding rows and what it stored.
  void run(const std::vector<Extend>& extends) {
    Step s = prepare(extends);
    run_step(layer_, context(), s, cache_);
    std::int32_t request = 0;
    sequences_.advance(extends, *s.out, [&](const Extend& extend, const TensorView& out) {
      accept(extend, request++ < s.plan.split.num_decodes, out);
    });
  }

  std::int64_t slot_of(std::size_t sequence, std::int32_t t) const {
    return sequences_.slot_of(sequence, t);
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
  PagedKvCache cache_of(const KvFormat& format) {
    return make_cache(format, sequences_.num_blocks(), options_.block_size,
                      memory_.emplace_back());
  }
  void make_caches() {
    if (options_.one_cache) {
      cache_ = GqaCache::columns_of(
          cache_of({.dtype = options_.dtype, .row_elements = dims_.k_size() + dims_.v_size()}),
          dims_);
      return;
    }
    const std::string name =
        options_.kv_format.empty() ? std::string(name_of(options_.dtype)) : options_.kv_format;
    cache_ = {.k = cache_of(
                  heads_format(name, dims_.num_kv_heads, dims_.head_dim, options_.kv_scale)),
              .v = cache_of(heads_format(name, dims_.num_kv_heads, dims_.v_head_dim,
                                         2 * options_.kv_scale))};
  }
  static std::int64_t axis_position(std::int64_t axis, std::int64_t position) {
    return axis == 0 ? position : axis == 1 ? position * 7 % 50 : position / 3;
  }
  int id_of(std::size_t sequence, std::int32_t t) const {
    return static_cast<int>(random_below(91 + sequence, static_cast<std::uint64_t>(t),
                                         options_.shape.adapters + 1)) -
           1;
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
    std::vector<double> row = oracle::gqa_rows(
        weights_.twin(id_of(sequence, t)), sequences_.hidden_of(sequence, t, t + 1), positions);
    if (options_.sections.multi_axis()) {
      rotate_by_axes(std::span(row).first(static_cast<std::size_t>(dims_.k_size())),
                     dims_.num_kv_heads, position);
    }
    return row;
  }
  std::vector<double> expected_query(std::size_t sequence, std::int32_t t,
                                     std::int64_t position) const {
    const std::int64_t positions[] = {position};
    std::vector<double> q = oracle::gqa_queries(
        weights_.twin(id_of(sequence, t)), sequences_.hidden_of(sequence, t, t + 1), positions);
    if (options_.sections.multi_axis()) rotate_by_axes(q, dims_.num_heads, position);
    return q;
  }

  /// `out`: the layer's rows of a sequence's newest tokens, already stored.
  void accept(const Extend& extend, bool is_decode, const TensorView& out) {
    const std::size_t i = extend.sequence;
    const std::int32_t end = sequences_.done(i), begin = end - extend.tokens;
    std::vector<double> q, k, v;
    // New tokens of prefills attend to each other as they were before they were stored.
    const bool reads_fresh = !is_decode && cache_.k.format().dtype != options_.dtype;
    for (std::int32_t t = 0; t < end; ++t) {
      const std::int64_t slot = sequences_.slot_of(i, t);
      std::vector<double> key = row_values(cache_.k, slot), value = row_values(cache_.v, slot);
      if (t >= begin) {
        const std::int64_t position = extend.position(begin, t - begin);
        const std::vector<double> row = expected_row(i, t, position);
        const auto split = row.begin() + dims_.k_size();
        const std::vector<double> fresh_key(row.begin(), split), fresh_value(split, row.end());
        const double limit = relative_limit(options_.dtype);
        EXPECT_LE(engine::stored_row_error(cache_.k.format(), fresh_key, key).error, limit)
            << "key of sequence " << i << ", token " << t;
        EXPECT_LE(engine::stored_row_error(cache_.v.format(), fresh_value, value).error, limit)
            << "value of sequence " << i << ", token " << t;
        if (reads_fresh) {
          key = fresh_key;
          value = fresh_value;
        }
        append(q, expected_query(i, t, position));
      }
      append(k, key);
      append(v, value);
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
  }
  static std::vector<double> row_values(const PagedKvCache& cache, std::int64_t slot) {
    return oracle::decode_row(cache.slot(slot), cache.format().row_elements,
                              oracle_format(cache.format()));
  }
  static void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  GqaOptions options_;
  GqaDims dims_;
  GqaLayerWeights weights_;
  Runtime runtime_;
  AttentionLayer layer_;
  Sequences sequences_;
  std::vector<Tensor> memory_;
  GqaCache cache_;
};

}  // namespace fovea::test
