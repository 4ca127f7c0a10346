// An MLA layer with sequences, a paged cache and a float64 twin. Every byte that a step must not
// use is NaN or a wrong id, and every step is checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/stored_row_error.h"
#include "fovea/mla.h"
#include "fovea/oracle.h"
#include "fovea/runtime.h"
#include "layers/absorbed_form.h"
#include "layers/layer_weights.h"
#include "layers/mla_rules.h"
#include "layers/rows_difference.h"
#include "layers/sequences.h"
#include "support/compare.h"
#include "support/oracle_format.h"

namespace fovea::test {

struct WorldOptions {
  LayerShape shape;
  DType dtype = DType::f32;
  std::string kv_format = "";  ///< Empty: that of dtype.
  float kv_scale = 1;          ///< Of formats with one scale.
  KvBOrder order = KvBOrder::per_head;
  MlaAbsorption absorption = MlaAbsorption::two_step;
  LinearBackend linear = LinearBackend::automatic;
  bool requantize_absorbed = false;
  float q_scale = 0;
  AbsorbedProducts absorbed_products = AbsorbedProducts::dense;
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
                .linear = linear_for(context(), options.linear),
                .requantize_absorbed = options.requantize_absorbed,
                .q_scale = options.q_scale,
                .absorbed_products = options.absorbed_products,
                .memory = context().memory}),
        sequences_(std::move(lengths), {.dtype = options.dtype,
                                        .hidden_size = options.shape.hidden,
                                        .block_size = options.block_size,
                                        .seed = seed,
                                        .block_seed = options.block_seed}) {
    set_oracle_rotary();
    const std::string kv_format =
        options.kv_format.empty() ? std::string(name_of(options.dtype)) : options.kv_format;
    cache_ = make_cache(latent_format(kv_format, options.shape.latent, options.shape.rope,
                                      {options.kv_scale, options.kv_scale}),
                        sequences_.num_blocks(), options.block_size, cache_memory_);
  }

  const MlaLayer& layer() const { return layer_; }
  MlaLayer& layer() { return layer_; }
  LayerWeights& weights() { return weights_; }
  const PagedKvCache& cache() const { return cache_; }
  const OpContext& context() const { return runtime_.context(); }
  std::int32_t done(std::size_t sequence) const { return sequences_.done(sequence); }
  /// Layer outputs of a sequence so far, [done, H].
  const std::vector<double>& outputs(std::size_t sequence) const {
    return sequences_.outputs(sequence);
  }
  /// Stored rows of a sequence so far, [done, L + R].
  std::vector<double> stored_rows(std::size_t sequence) const {
    const KvFormat& format = cache_.format();
    std::vector<double> rows;
    for (std::int32_t t = 0; t < done(sequence); ++t) {
      const std::vector<double> row =
          oracle::decode_row(cache_.slot(sequences_.slot_of(sequence, t)), format.row_elements,
                             oracle_format(format));
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }
  std::span<const double> hidden_of(std::size_t sequence, std::int32_t begin,
                                    std::int32_t end) const {
    return sequences_.hidden_of(sequence, begin, end);
  }

  /// Operands of a step, prepared but not run.
  using Step = StepOperands;

  Step prepare(const std::vector<Extend>& extends) const {
    Step s = sequences_.operands(extends, plan_of(extends), options_.padding_rows);
    std::vector<double> positions(static_cast<std::size_t>(s.rows()), -77);
    auto next = positions.begin();
    for (const Extend& extend : extends) {
      for (std::int32_t i = 0; i < extend.tokens; ++i) {
        *next++ = extend.position(done(extend.sequence), i);
      }
    }
    s.positions = tensor_from(DType::i32, {s.rows()}, positions);
    if (options_.rotates) s.step.positions = s.positions;
    if (options_.two_dim_positions) s.step.positions = s.positions.view().split(0, 1, s.rows());
    return s;
  }

  BatchPlan plan_of(const std::vector<Extend>& extends) const {
    SequenceBatch batch = sequences_.batch(extends);
    if (options_.all_prefilling) batch.is_prefilling.assign(extends.size(), 1);
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
    run_step(layer_, context(), s, cache_);
    std::int32_t request = 0;
    sequences_.advance(extends, *s.out, [&](const Extend& extend, const TensorView& out) {
      accept(extend, request++ < s.plan.split.num_decodes, out);
    });
  }

  /// Whole prompts of all sequences but `keep` tokens, in one step.
  void prefill_all_but(std::int32_t keep) {
    std::vector<Extend> extends;
    const std::vector<std::int32_t>& lengths = sequences_.lengths();
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] > keep) extends.push_back({i, lengths[i] - keep});
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
  bool rounds_decodes() const {
    return options_.q_scale > 0 || options_.absorbed_products != AbsorbedProducts::dense;
  }
  AbsorbedForm absorbed_form() const {
    AbsorbedForm form =
        test::absorbed_form(weights_.oracle(), options_.absorbed_products,
                            options_.shape.fp8.value_or(WeightGroups{}));
    form.q_scale = static_cast<double>(options_.q_scale);
    return form;
  }
  /// `out`: the layer's rows of a sequence's newest tokens, already stored.
  void accept(const Extend& extend, bool is_decode, const TensorView& out) {
    const std::size_t i = extend.sequence;
    const std::int32_t end = done(i), begin = end - extend.tokens;
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
      const auto stored = std::span(rows).subspan(static_cast<std::size_t>(t) * row_elements,
                                                  row_elements);
      const engine::StoredRowError found =
          engine::stored_row_error(cache_.format(), expected, stored);
      EXPECT_LE(found.error, relative_limit(options_.dtype))
          << "stored row of sequence " << i << ", token " << t << ", element " << found.element
          << ": expected " << expected[found.element] << ", got " << stored[found.element];
    }
    // New tokens of prefills attend to each other as they were before they were stored.
    if (!is_decode && cache_.format().dtype != options_.dtype) {
      std::copy(fresh.begin(), fresh.end(),
                rows.begin() +
                    static_cast<std::ptrdiff_t>(begin) * static_cast<std::ptrdiff_t>(row_elements));
    }
    const bool plain =
        options_.variant == AttentionVariant{} && !options_.shape.sinks && extend.tree.empty();
    const std::vector<double> expected =
        is_decode && rounds_decodes()
            ? mla_layer_absorbed(weights_.oracle(), absorbed_form(), hidden, positions, rows)
        : plain
            ? oracle::mla_layer(
                  weights_.oracle(), hidden, positions, rows,
                  extend.tokens > 4 ? oracle::MlaForm::expanded : oracle::MlaForm::absorbed)
            : test::mla_layer_by_rules(weights_.oracle(),
                                       {options_.variant, weights_.sinks(), extend.tree}, hidden,
                                       positions, rows);
    const double limit =
        options_.output_limit > 0 ? options_.output_limit : relative_limit(options_.dtype);
    EXPECT_TRUE(rows_close(expected, out, {limit, 0}))
        << "sequence " << i << ", tokens [" << begin << ", " << end << ")";
  }

  WorldOptions options_;
  LayerWeights weights_;
  std::shared_ptr<const RotaryEmbedding> rotary_;
  Runtime runtime_;
  MlaLayer layer_;
  Sequences sequences_;
  Tensor cache_memory_;
  PagedKvCache cache_;
};

}  // namespace fovea::test
