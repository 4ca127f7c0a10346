// Cases of ops that look at one row at a time.
#include <algorithm>
#include <limits>

#include "cases/operands.h"
#include "cases/problems.h"
#include "fovea/oracle.h"
#include "fovea/rotary.h"

namespace fovea::cases {
namespace {

class RmsNormProblem : public Problem {
 public:
  RmsNormProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx), random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))) {
    const std::int64_t tokens = line.integer("tokens", 512, {0});
    const std::int64_t dim = line.integer("dim", 2048);
    const std::int64_t pad = line.integer("pad", 0, {0});
    x_ = normal_array(ctx, {line.dtype(), {tokens, dim}, pad}, random_, 3.0);
    weight_ = normal_array(ctx, {line.dtype(), {dim}}, random_);
    out_ = poisoned_array(ctx, {line.dtype(), {tokens, dim}, pad});
  }
  void run() override {
    rms_norm(ctx_, {.x = x_.view, .weight = weight_.view, .out = out_.view, .eps = kEps});
  }
  Work work() const override {
    const auto elements = static_cast<double>(x_.view.numel());
    return {.flops = 4 * elements,
            .bytes = 2 * elements * static_cast<double>(bytes_of(x_.view.dtype, 1))};
  }
  CheckResult check() const override {
    RowChecker checker(row_limit(x_.view.dtype));
    checker.rows("out", out_.values(), oracle::rms_norm(x_.values(), weight_.values(), kEps),
                 weight_.view.numel());
    checker.require(out_.pads_untouched(), "bytes between the rows of out were written");
    return checker.result();
  }

 private:
  static constexpr float kEps = 1e-6f;
  const OpContext& ctx_;
  Random random_;
  Array x_;
  Array weight_;
  Array out_;
};

class RopeProblem : public Problem {
 public:
  RopeProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx), random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))) {
    const std::int64_t tokens = line.integer("tokens", 512, {0});
    heads_ = line.integer("heads", 16);
    const std::int64_t dim = line.integer("dim", 64);
    is_interleaved_ = line.word("pairing", "neox", {"neox", "interleaved"}) == "interleaved";
    x_ = normal_array(ctx, {line.dtype(), {tokens, heads_, dim}, line.integer("pad", 0, {0})},
                      random_);
    before_ = x_.values();
    RopeConfig config;
    config.dim = dim;
    config.theta = kTheta;
    config.max_position = kMaxPosition;
    config.pairing = is_interleaved_ ? RopePairing::interleaved : RopePairing::neox;
    rotary_ = RotaryEmbedding(config, ctx.memory);
    for (std::int64_t t = 0; t < tokens; ++t) {
      positions_.push_back(random_.integer(0, kMaxPosition - 1));
    }
    position_rows_ = index_array(ctx, positions_);
  }
  void run() override {
    rope(ctx_, {.x = x_.view, .angles = rotary_.angles(position_rows_)});
  }
  Work work() const override {
    const auto elements = static_cast<double>(x_.view.numel());
    return {.flops = 3 * elements,
            .bytes = 2 * elements * static_cast<double>(bytes_of(x_.view.dtype, 1))};
  }
  CheckResult check() const override {
    std::vector<double> expected = before_;
    oracle::rotate(expected, positions_, heads_,
                   oracle::rotary(rotary_.config().dim, kTheta, is_interleaved_));
    RowChecker checker(row_limit(x_.view.dtype));
    checker.rows("x", x_.values(), expected, rotary_.config().dim);
    checker.require(x_.pads_untouched(), "bytes between the rows of x were written");
    return checker.result();
  }

 private:
  static constexpr double kTheta = 10000.0;
  static constexpr std::int64_t kMaxPosition = 4096;
  const OpContext& ctx_;
  Random random_;
  std::int64_t heads_ = 0;
  bool is_interleaved_ = false;
  Array x_;
  std::vector<double> before_;
  RotaryEmbedding rotary_;
  std::vector<std::int64_t> positions_;
  Tensor position_rows_;
};

class MergeStateProblem : public Problem {
 public:
  MergeStateProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        tokens_(line.integer("tokens", 512, {0})),
        heads_(line.integer("heads", 16)),
        dim_(line.integer("dim", 128)) {
    const std::int64_t pad = line.integer("pad", 0, {0});
    const auto empty_percent = static_cast<double>(line.integer("empty", 0, {0, 100}));
    prefix_ = make_part(line.dtype(), pad, empty_percent / 100);
    suffix_ = make_part(line.dtype(), pad, empty_percent / 100);
    const std::string alias = line.word("alias", "none", {"none", "prefix", "suffix"});
    result_ = {poisoned_array(ctx, {line.dtype(), {tokens_, heads_, dim_}, pad}),
               poisoned_array(ctx, {DType::f32, {heads_, tokens_}, pad}),
               {}};
    if (line.integer("sinks", 0, {0, 1}) == 1) {
      sinks_ = normal_array(ctx, {DType::f32, {heads_}}, random_, 2.0);
    }
    const std::vector<double> sinks = sinks_.view ? sinks_.values() : std::vector<double>{};
    expected_ = oracle::merge(prefix_.expected, suffix_.expected, heads_, tokens_, dim_, sinks);
    written_ = alias == "none" ? &result_ : alias == "prefix" ? &prefix_ : &suffix_;
  }
  void run() override {
    merge_state(ctx_, {.prefix = prefix_.state(),
                       .suffix = suffix_.state(),
                       .result = written_->state(),
                       .sinks = sinks_.view});
  }
  Work work() const override {
    const auto elements = static_cast<double>(tokens_ * heads_ * dim_);
    return {.flops = 3 * elements,
            .bytes = 3 * elements * static_cast<double>(bytes_of(result_.out.view.dtype, 1))};
  }
  CheckResult check() const override {
    RowChecker checker(row_limit(result_.out.view.dtype), kSmallOutput);
    checker.rows("out", written_->out.values(), expected_.out, dim_);
    checker.lse(written_->lse.values(), expected_.lse);
    checker.require(written_->out.pads_untouched() && written_->lse.pads_untouched(),
                    "bytes between the rows of the result were written");
    return checker.result();
  }

 private:
  struct Part {
    Array out;
    Array lse;
    oracle::AttentionResult expected;
    AttentionState state() const { return {.out = out.view, .lse = lse.view}; }
  };

  /// Rows are empty with `empty_share`: lse -inf over an `out` of NaN that must not count.
  Part make_part(DType dtype, std::int64_t pad, double empty_share) {
    Part part{normal_array(ctx_, {dtype, {tokens_, heads_, dim_}, pad}, random_),
              normal_array(ctx_, {DType::f32, {heads_, tokens_}, pad}, random_, 3.0),
              {}};
    part.expected = {part.out.values(), part.lse.values()};
    const Array poison = poisoned_array(ctx_, {dtype, {dim_}});
    for (std::int64_t t = 0; t < tokens_; ++t) {
      for (std::int64_t n = 0; n < heads_; ++n) {
        if (!random_.chance(empty_share)) continue;
        *part.lse.view.ptr<float>({n, t}) = -std::numeric_limits<float>::infinity();
        copy(poison.view, part.out.view.select(0, t).select(0, n));
        part.expected.lse[static_cast<std::size_t>(n * tokens_ + t)] =
            -std::numeric_limits<double>::infinity();
        std::fill_n(part.expected.out.begin() + (t * heads_ + n) * dim_, dim_, 0.0);
      }
    }
    return part;
  }

  const OpContext& ctx_;
  Random random_;
  std::int64_t tokens_;
  std::int64_t heads_;
  std::int64_t dim_;
  Part prefix_;
  Part suffix_;
  Part result_;
  Array sinks_;
  const Part* written_ = nullptr;
  oracle::AttentionResult expected_;
};

}  // namespace

ProblemPtr make_rms_norm(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<RmsNormProblem>(line, ctx);
}
ProblemPtr make_rope(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<RopeProblem>(line, ctx);
}
ProblemPtr make_merge_state(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<MergeStateProblem>(line, ctx);
}

}  // namespace fovea::cases
