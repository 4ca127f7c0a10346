// Cases of products with weights, dense or as checkpoints quantise them.
#include <cmath>

#include "cases/operands.h"
#include "cases/problems.h"
#include "fovea/linear.h"
#include "fovea/oracle.h"

namespace fovea::cases {
namespace {

class LinearProblem : public Problem {
 public:
  LinearProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        tokens_(line.integer("tokens", 8, {0})),
        in_(line.integer("in", 2048)),
        out_features_(line.integer("out", 2048)) {
    Random random(static_cast<std::uint64_t>(line.integer("seed", 0, {0})));
    const std::int64_t pad = line.integer("pad", 0, {0});
    x_ = normal_array(ctx, {line.dtype(), {tokens_, in_}, pad}, random);
    weight_ = normal_array(ctx, {line.dtype(), {out_features_, in_}}, random);
    if (line.integer("bias", 0, {0, 1}) == 1) {
      bias_ = normal_array(ctx, {line.dtype(), {out_features_}}, random);
    }
    out_ = poisoned_array(ctx, {line.dtype(), {tokens_, out_features_}, pad});
    if (line.word("weight", "dense", {"dense", "fp8"}) == "fp8") {
      codes_ = quantize_weight(weight_.view, {.out = line.integer("group_out", 128, {0}),
                                              .in = line.integer("group_in", 128, {0})});
      linear_ = Linear(codes_, bias_.view, line.dtype(), ctx.memory);
    } else {
      linear_ = Linear(weight_.view, bias_.view, LinearBackend::automatic, ctx.memory);
    }
    reserve_poisoned(ctx, linear_.workspace_bytes(tokens_));
  }
  void run() override { linear_(ctx_, x_.view, out_.view); }
  Work work() const override {
    const auto elements = static_cast<double>(tokens_ * (in_ + out_features_));
    return {.flops = 2.0 * static_cast<double>(tokens_ * in_) * static_cast<double>(out_features_),
            .bytes = elements * static_cast<double>(bytes_of(x_.view.dtype, 1)) +
                     static_cast<double>(linear_.weight_bytes())};
  }
  CheckResult check() const override {
    // Decoded weights may be rounded to the dtype before the product. Sums of `in` products of
    // normal values are of the order of sqrt(in); smaller ones are what cancelled.
    const DType dtype = x_.view.dtype;
    RowChecker checker(row_limit(dtype) + (codes_.codes ? rounding(dtype) : 0),
                       std::sqrt(static_cast<double>(in_)));
    const std::vector<double> bias = bias_.view ? bias_.values() : std::vector<double>{};
    checker.rows("out", out_.values(), oracle::linear(x_.values(), weights(), bias, in_),
                 out_features_);
    checker.require(out_.pads_untouched(), "bytes between the rows of out were written");
    return checker.result();
  }

 private:
  std::vector<double> weights() const {
    if (!codes_.codes) return weight_.values();
    const TensorView codes = codes_.codes, scale = codes_.scale;
    std::vector<double> all;
    all.reserve(static_cast<std::size_t>(out_features_ * in_));
    for (std::int64_t m = 0; m < out_features_; ++m) {
      const std::int64_t i = codes_.groups.out == 0 ? 0 : m / codes_.groups.out;
      const std::vector<double> row =
          oracle::decode(codes.ptr<std::uint8_t>({m, 0}), in_, oracle::Format::f8e4m3fn);
      for (std::int64_t k = 0; k < in_; ++k) {
        const std::int64_t j = codes_.groups.in == 0 ? 0 : k / codes_.groups.in;
        all.push_back(row[static_cast<std::size_t>(k)] *
                      static_cast<double>(*scale.ptr<float>({i, j})));
      }
    }
    return all;
  }

  const OpContext& ctx_;
  std::int64_t tokens_, in_, out_features_;
  Array x_, weight_, bias_, out_;
  OwnedQuantizedWeight codes_;
  Linear linear_;
};

}  // namespace

ProblemPtr make_linear(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<LinearProblem>(line, ctx);
}

}  // namespace fovea::cases
