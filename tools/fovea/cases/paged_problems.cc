// Cases of grouped queries over keys and values in blocks: decode, and prefill of new tokens with
// their context.
#include <algorithm>
#include <numeric>

#include "cases/operands.h"
#include "cases/problems.h"
#include "cases/ragged_result.h"
#include "cases/rules.h"

namespace fovea::cases {
namespace {

class PagedProblem : public Problem {
 public:
  PagedProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        is_decode_(line.op() == "attention_decode"),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        heads_(line.integer("heads", 32)),
        kv_heads_(line.integer("kv_heads", is_decode_ ? 8 : heads_)),
        qk_dim_(line.integer("qk", 128)),
        v_dim_(line.integer("v", qk_dim_)),
        sm_scale_(1.0f / std::sqrt(static_cast<float>(qk_dim_))) {
    read_lengths(line);
    rules_ = is_decode_ ? read_decode_rules(ctx, line, heads_, query_start_loc_, random_)
                        : read_rules(ctx, line, heads_, random_);
    const std::int64_t pad = line.integer("pad", 0, {0});
    const std::string cache = line.word("cache", name_of(line.dtype()), kv_format_names());
    const std::vector<std::int64_t> seq_lens(seq_lens_.begin(), seq_lens_.end());
    keys_ = make_cached_sequences(
        ctx,
        {heads_format(cache, kv_heads_, qk_dim_), line.integer("block_size", 16), pad},
        seq_lens, random_);
    std::vector<std::int64_t> first_keys;
    for (std::size_t i = 0; i < seq_lens.size(); ++i) {
      first_keys.push_back(first_key(i));
      keys_.hide_before(i, first_keys.back());
    }
    values_ = keys_.beside(heads_format(cache, kv_heads_, v_dim_), pad, ctx);
    keys_.fill(ctx, first_keys, seq_lens, random_);
    values_.fill(ctx, first_keys, seq_lens, random_);
    tokens_ = query_start_loc_.back() + line.integer("padding", 0, {0});
    q_ = normal_array(ctx, {line.dtype(), {tokens_, heads_, qk_dim_}, pad}, random_, kScoreStddev);
    out_ = poisoned_array(
        ctx, {line.dtype_value("out", line.dtype()), {tokens_, heads_, v_dim_}, pad});
    if (has_lse(line)) lse_ = poisoned_array(ctx, {DType::f32, {heads_, tokens_}, pad});
    if (is_decode_) {
      plan_decode();
    } else {
      plan_prefill();
    }
  }
  void prepare() override {
    if (!is_decode_) return;
    prepared_ = Tensor::empty(DType::u8, {workspace_bytes(ctx_, decode_)}, ctx_.memory);
    decode_.prepared = prepared_;
    fovea::prepare(ctx_, decode_);
  }
  void run() override {
    if (is_decode_) {
      attention_decode(ctx_, decode_);
    } else {
      attention_prefill(ctx_, prefill_);
    }
  }
  Work work() const override {
    Work work;
    const double q_bytes = static_cast<double>(bytes_of(q_.view.dtype, 1) * qk_dim_);
    const double out_bytes = static_cast<double>(bytes_of(out_.view.dtype, 1) * v_dim_);
    for (std::size_t i = 0; i < seq_lens_.size(); ++i) {
      work.flops += 2 * static_cast<double>(heads_ * (qk_dim_ + v_dim_)) *
                    rules_.visible_pairs(query_start_loc_[i], queries(i), seq_lens_[i]);
      const std::int64_t row_bytes =
          keys_.cache.format().row_bytes() + values_.cache.format().row_bytes();
      work.bytes += static_cast<double>((seq_lens_[i] - first_key(i)) * row_bytes);
    }
    work.bytes += static_cast<double>(query_start_loc_.back() * heads_) * (q_bytes + out_bytes);
    return work;
  }
  CheckResult check() const override {
    const std::vector<double> q = q_.values(), sinks = rules_.sink_values();
    RaggedResult expected(tokens_, heads_, v_dim_);
    for (std::size_t i = 0; i < seq_lens_.size(); ++i) {
      const std::int64_t begin = query_start_loc_[i], end = query_start_loc_[i + 1];
      if (begin == end) continue;
      const std::vector<double> k = keys_.rows(i, 0, seq_lens_[i]);
      const std::vector<double> v = values_.rows(i, 0, seq_lens_[i]);
      const std::vector<double> query = slice(q, begin * heads_ * qk_dim_, end * heads_ * qk_dim_);
      oracle::Attention problem = rules_.problem(end - begin, seq_lens_[i]);
      problem.num_heads = heads_;
      problem.num_kv_heads = kv_heads_;
      problem.qk_dim = qk_dim_;
      problem.v_dim = v_dim_;
      problem.sm_scale = sm_scale_;
      problem.sinks = sinks;
      problem.draft_tree = rules_.tree_of(begin, end);
      problem.q = query;
      problem.k = k;
      problem.v = v;
      expected.place(oracle::attention(problem), begin);
    }
    return expected.check(out_, lse_, attention_limit(q_.view.dtype));
  }

 private:
  void read_lengths(const CaseLine& line) {
    std::vector<std::int64_t> q, kv;
    if (is_decode_) {
      q = line.integers("q", {1}, {0});
      kv = line.integers("kv", {4096}, {0});
    } else {
      q = line.integers("tokens", {2048}, {0});
      kv = line.integers("keys", q, {0});
    }
    const auto batch = static_cast<std::size_t>(line.integer("batch", 1));
    const std::size_t requests = std::max({batch, q.size(), kv.size()});
    q.resize(requests, q.back());
    kv.resize(requests, kv.back());
    query_start_loc_ = running_sum(q);
    seq_lens_ = to_int32(kv);
  }
  std::int64_t queries(std::size_t i) const {
    return query_start_loc_[i + 1] - query_start_loc_[i];
  }
  std::int64_t first_key(std::size_t i) const {
    return rules_.first_key(queries(i), seq_lens_[i]);
  }
  PagedKv paged() const { return {&keys_.cache, &values_.cache, keys_.table(), kv_heads_}; }

  void plan_decode() {
    decode_schedule_ = schedule_decode(query_start_loc_, seq_lens_, ctx_.plan_target,
                                       rules_.variant, rules_.draft_tree);
    decode_ = {.q = q_.view,
               .kv = paged(),
               .out = out_.view,
               .lse = lse_.view,
               .schedule = &decode_schedule_,
               .variant = rules_.variant,
               .sm_scale = sm_scale_,
               .sinks = rules_.sinks.view};
    reserve_poisoned(ctx_, workspace_bytes(ctx_, decode_));
  }
  void plan_prefill() {
    std::vector<std::int64_t> lens(seq_lens_.begin(), seq_lens_.end());
    prefill_schedule_ = schedule_prefill(query_start_loc_, running_sum(lens),
                                         ctx_.plan_target.prefill_query_tile, rules_.variant);
    prefill_.q = q_.view;
    prefill_.paged = paged();
    prefill_.out = out_.view;
    prefill_.lse = lse_.view;
    prefill_.schedule = &prefill_schedule_;
    prefill_.variant = rules_.variant;
    prefill_.sm_scale = sm_scale_;
    prefill_.sinks = rules_.sinks.view;
    reserve_poisoned(ctx_, workspace_bytes(ctx_, prefill_));
  }

  const OpContext& ctx_;
  bool is_decode_;
  Random random_;
  std::int64_t heads_;
  std::int64_t kv_heads_;
  std::int64_t qk_dim_;
  std::int64_t v_dim_;
  float sm_scale_;
  std::int64_t tokens_ = 0;  ///< Padding rows included.
  std::vector<std::int32_t> query_start_loc_;
  std::vector<std::int32_t> seq_lens_;
  Rules rules_;
  CachedSequences keys_;
  CachedSequences values_;
  Array q_;
  Array out_;
  Array lse_;
  DecodeSchedule decode_schedule_;
  PrefillSchedule prefill_schedule_;
  AttentionDecodeParams decode_;
  Tensor prepared_;
  AttentionPrefillParams prefill_;
};

}  // namespace

ProblemPtr make_paged_attention(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<PagedProblem>(line, ctx);
}

}  // namespace fovea::cases
