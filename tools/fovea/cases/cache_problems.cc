// Cases of ops that move rows into and out of a paged cache.
#include <numeric>

#include "cases/operands.h"
#include "cases/problems.h"
#include "fovea/oracle.h"
#include "fovea/rotary.h"

namespace fovea::cases {
namespace {

constexpr std::int64_t kMaxAppendPosition = 4096;
constexpr float kNormEps = 1e-6f;

/// Rows that are moved between equal dtypes stay as they are, bit for bit.
double move_limit(DType from, DType to) { return from == to ? 0.0 : rounding(to); }

/// With `fused` latents are normed and keys turn on the way.
class KvAppendProblem : public Problem {
 public:
  KvAppendProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        kv_lora_rank_(line.integer("kv_lora_rank", 512)),
        rope_dim_(line.integer("rope", 64)),
        is_fused_(line.integer("fused", 0, {0, 1}) == 1) {
    const std::int64_t tokens = line.integer("tokens", 512, {0});
    const std::int64_t pad = line.integer("pad", 0, {0});
    const auto skip_percent = static_cast<double>(line.integer("skip", 0, {0, 100}));
    sequences_ = make_cached_sequences(
        ctx, {.format = {line.dtype_value("cache", line.dtype()), kv_lora_rank_ + rope_dim_},
         .block_size = line.integer("block_size", 64),
         .pad = pad},
        {tokens}, random_);
    kv_c_ = normal_array(ctx, {line.dtype(), {tokens, kv_lora_rank_}, pad}, random_);
    k_pe_ = normal_array(ctx, {line.dtype(), {tokens, rope_dim_}, pad}, random_);
    for (std::int64_t t = 0; t < tokens; ++t) {
      slots_.push_back(random_.chance(skip_percent / 100) ? -1 : sequences_.slot(0, t));
      positions_.push_back(random_.integer(0, kMaxAppendPosition - 1));
    }
    slot_mapping_ = index_array(ctx, slots_);
    position_rows_ = index_array(ctx, positions_);
    if (is_fused_) {
      norm_weight_ = normal_array(ctx, {line.dtype(), {kv_lora_rank_}}, random_);
      RopeConfig config;
      config.dim = rope_dim_;
      config.max_position = kMaxAppendPosition;
      config.pairing = RopePairing::neox;
      rotary_ = RotaryEmbedding(config, ctx.memory);
    }
  }
  void run() override {
    KvAppendParams params{.kv_c = kv_c_.view,
                          .k_pe = k_pe_.view,
                          .slot_mapping = slot_mapping_,
                          .cache = &sequences_.cache};
    if (is_fused_) {
      params.norm_weight = norm_weight_.view;
      params.norm_eps = kNormEps;
      params.rope = rotary_.angles(position_rows_);
    }
    kv_append(ctx_, params);
  }
  Work work() const override {
    const auto elements = static_cast<double>(kv_c_.view.numel() + k_pe_.view.numel());
    const DType stored = sequences_.cache.format().dtype;
    return {.flops = 0,
            .bytes = elements *
                     static_cast<double>(bytes_of(kv_c_.view.dtype, 1) + bytes_of(stored, 1))};
  }
  CheckResult check() const override {
    const double moved = move_limit(kv_c_.view.dtype, sequences_.cache.format().dtype);
    RowChecker checker(is_fused_ ? moved + row_limit(kv_c_.view.dtype) : moved);
    std::vector<double> kv_c = kv_c_.values();
    std::vector<double> k_pe = k_pe_.values();
    if (is_fused_) {
      kv_c = oracle::rms_norm(kv_c, norm_weight_.values(), kNormEps);
      oracle::rotate(k_pe, positions_, 1, oracle::rotary(rope_dim_, RopeConfig{}.theta, false));
    }
    for (std::size_t t = 0; t < slots_.size(); ++t) {
      const auto position = static_cast<std::int64_t>(t);
      const std::vector<double> stored = sequences_.rows(0, position, position + 1);
      if (slots_[t] < 0) {
        checker.require(std::isnan(stored.front()) && std::isnan(stored.back()),
                        "a skipped slot was written");
        continue;
      }
      std::vector<double> expected(kv_c.begin() + position * kv_lora_rank_,
                                   kv_c.begin() + (position + 1) * kv_lora_rank_);
      expected.insert(expected.end(), k_pe.begin() + position * rope_dim_,
                      k_pe.begin() + (position + 1) * rope_dim_);
      checker.rows("slot of token " + std::to_string(t), stored, expected,
                   kv_lora_rank_ + rope_dim_);
    }
    return checker.result();
  }

 private:
  const OpContext& ctx_;
  Random random_;
  std::int64_t kv_lora_rank_;
  std::int64_t rope_dim_;
  bool is_fused_;
  CachedSequences sequences_;
  Array kv_c_;
  Array k_pe_;
  std::vector<std::int64_t> slots_;
  Tensor slot_mapping_;
  Array norm_weight_;
  RotaryEmbedding rotary_;
  std::vector<std::int64_t> positions_;
  Tensor position_rows_;
};

class KvGatherProblem : public Problem {
 public:
  KvGatherProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        row_(line.integer("row", 576)) {
    const std::vector<std::int64_t> lens = line.integers("lens", {4096}, {0});
    std::vector<std::int64_t> starts =
        line.integers("starts", std::vector<std::int64_t>(lens.size(), 0), {0});
    starts.resize(lens.size(), 0);
    const std::int64_t pad = line.integer("pad", 0, {0});
    starts_ = to_int32(starts);
    seq_lens_ = to_int32(lens);
    std::vector<std::int64_t> ends;
    for (std::size_t i = 0; i < lens.size(); ++i) ends.push_back(starts_[i] + lens[i]);
    sequences_ = make_cached_sequences(
        ctx,
        {.format = {line.dtype_value("cache", line.dtype()), row_},
         .block_size = line.integer("block_size", 64),
         .pad = pad},
        ends, random_);
    sequences_.fill(ctx, starts, ends, random_);
    const std::int64_t total = std::accumulate(lens.begin(), lens.end(), std::int64_t{0});
    out_ = poisoned_array(ctx, {line.dtype(), {total, row_}, pad});
  }
  void run() override {
    kv_gather(ctx_, {.cache = &sequences_.cache,
                     .block_table = sequences_.table(),
                     .starts = starts_,
                     .seq_lens = seq_lens_,
                     .out = out_.view});
  }
  Work work() const override {
    const DType stored = sequences_.cache.format().dtype;
    return {.flops = 0,
            .bytes = static_cast<double>(out_.view.numel()) *
                     static_cast<double>(bytes_of(out_.view.dtype, 1) + bytes_of(stored, 1))};
  }
  CheckResult check() const override {
    RowChecker checker(move_limit(sequences_.cache.format().dtype, out_.view.dtype));
    std::vector<double> expected;
    for (std::size_t i = 0; i < seq_lens_.size(); ++i) {
      const std::vector<double> rows = sequences_.rows(i, starts_[i], starts_[i] + seq_lens_[i]);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    checker.rows("out", out_.values(), expected, row_);
    checker.require(out_.pads_untouched(), "bytes between the rows of out were written");
    return checker.result();
  }

 private:
  const OpContext& ctx_;
  Random random_;
  std::int64_t row_;
  CachedSequences sequences_;
  std::vector<std::int32_t> starts_;
  std::vector<std::int32_t> seq_lens_;
  Array out_;
};

/// Keys turn on the way where the line has `rope`.
class GqaAppendProblem : public Problem {
 public:
  GqaAppendProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        kv_heads_(line.integer("kv_heads", 8)),
        qk_dim_(line.integer("qk", 128)),
        v_dim_(line.integer("v", qk_dim_)),
        rope_dim_(line.integer("rope", 0, {0, qk_dim_})),
        is_interleaved_(line.word("pairing", "neox", {"neox", "interleaved"}) == "interleaved") {
    const std::int64_t tokens = line.integer("tokens", 512, {0});
    const std::int64_t pad = line.integer("pad", 0, {0});
    const auto skip_percent = static_cast<double>(line.integer("skip", 0, {0, 100}));
    const std::int64_t k_width = kv_heads_ * qk_dim_, v_width = kv_heads_ * v_dim_;
    sequences_ =
        make_cached_sequences(ctx, {{line.dtype_value("cache", line.dtype()), k_width + v_width},
                               line.integer("block_size", 16),
                               pad},
                              {tokens}, random_);
    k_cache_ = sequences_.cache.columns(0, k_width);
    v_cache_ = sequences_.cache.columns(k_width, v_width);
    k_ = normal_array(ctx, {line.dtype(), {tokens, kv_heads_, qk_dim_}, pad}, random_);
    v_ = normal_array(ctx, {line.dtype(), {tokens, kv_heads_, v_dim_}, pad}, random_);
    for (std::int64_t t = 0; t < tokens; ++t) {
      slots_.push_back(random_.chance(skip_percent / 100) ? -1 : sequences_.slot(0, t));
      positions_.push_back(random_.integer(0, kMaxAppendPosition - 1));
    }
    slot_mapping_ = index_array(ctx, slots_);
    position_rows_ = index_array(ctx, positions_);
    if (rope_dim_ > 0) {
      RopeConfig config;
      config.dim = rope_dim_;
      config.max_position = kMaxAppendPosition;
      config.pairing = is_interleaved_ ? RopePairing::interleaved : RopePairing::neox;
      rotary_ = RotaryEmbedding(config, ctx.memory);
    }
  }
  void run() override {
    GqaAppendParams params;
    params.k = k_.view;
    params.v = v_.view;
    params.slot_mapping = slot_mapping_;
    params.k_cache = &k_cache_;
    params.v_cache = &v_cache_;
    if (rope_dim_ > 0) params.rope = rotary_.angles(position_rows_);
    gqa_append(ctx_, params);
  }
  Work work() const override {
    const auto elements = static_cast<double>(k_.view.numel() + v_.view.numel());
    const DType stored = sequences_.cache.format().dtype;
    return {
        .flops = 0,
        .bytes = elements * static_cast<double>(bytes_of(k_.view.dtype, 1) + bytes_of(stored, 1))};
  }
  CheckResult check() const override {
    const DType stored_dtype = sequences_.cache.format().dtype;
    const double moved = move_limit(k_.view.dtype, stored_dtype);
    RowChecker checker(rope_dim_ > 0 ? moved + row_limit(k_.view.dtype) : moved);
    std::vector<double> k = k_.values();
    if (rope_dim_ > 0) {
      oracle::rotate(k, positions_, kv_heads_,
                     oracle::rotary(rope_dim_, RopeConfig{}.theta, is_interleaved_), qk_dim_);
    }
    const std::vector<double> v = v_.values();
    const std::int64_t k_width = kv_heads_ * qk_dim_, v_width = kv_heads_ * v_dim_;
    for (std::size_t t = 0; t < slots_.size(); ++t) {
      const auto position = static_cast<std::int64_t>(t);
      const std::vector<double> stored = sequences_.rows(0, position, position + 1);
      if (slots_[t] < 0) {
        checker.require(std::isnan(stored.front()) && std::isnan(stored.back()),
                        "a skipped slot was written");
        continue;
      }
      const std::span<const double> row(stored);
      checker.rows("keys of token " + std::to_string(t),
                   row.first(static_cast<std::size_t>(k_width)),
                   std::span(k).subspan(t * static_cast<std::size_t>(k_width),
                                        static_cast<std::size_t>(k_width)),
                   k_width);
      checker.rows("values of token " + std::to_string(t),
                   row.last(static_cast<std::size_t>(v_width)),
                   std::span(v).subspan(t * static_cast<std::size_t>(v_width),
                                        static_cast<std::size_t>(v_width)),
                   v_width);
    }
    return checker.result();
  }

 private:
  const OpContext& ctx_;
  Random random_;
  std::int64_t kv_heads_;
  std::int64_t qk_dim_;
  std::int64_t v_dim_;
  std::int64_t rope_dim_;
  bool is_interleaved_;
  RotaryEmbedding rotary_;
  CachedSequences sequences_;
  PagedKvCache k_cache_;
  PagedKvCache v_cache_;
  Array k_;
  Array v_;
  std::vector<std::int64_t> slots_;
  std::vector<std::int64_t> positions_;
  Tensor slot_mapping_;
  Tensor position_rows_;
};

}  // namespace

ProblemPtr make_gqa_append(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<GqaAppendProblem>(line, ctx);
}
ProblemPtr make_kv_append(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<KvAppendProblem>(line, ctx);
}
ProblemPtr make_kv_gather(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<KvGatherProblem>(line, ctx);
}

}  // namespace fovea::cases
