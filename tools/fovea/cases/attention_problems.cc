// Cases of the attention kernels: absorbed MLA decode over a paged cache, ragged prefill.
#include <algorithm>
#include <numeric>

#include "cases/operands.h"
#include "cases/problems.h"
#include "cases/ragged_result.h"
#include "cases/rules.h"
#include "fovea/oracle.h"

namespace fovea::cases {

std::vector<double> join_rows(const std::vector<double>& a, std::int64_t a_width,
                              const std::vector<double>& b, std::int64_t b_width) {
  std::vector<double> joined;
  joined.reserve(a.size() + b.size());
  for (std::size_t row = 0; row * static_cast<std::size_t>(a_width) < a.size(); ++row) {
    const auto r = static_cast<std::ptrdiff_t>(row);
    joined.insert(joined.end(), a.begin() + r * a_width, a.begin() + (r + 1) * a_width);
    joined.insert(joined.end(), b.begin() + r * b_width, b.begin() + (r + 1) * b_width);
  }
  return joined;
}

namespace {

/// `value` for each of `count` requests where only one is given.
std::vector<std::int64_t> broadcast(std::vector<std::int64_t> values, std::size_t count) {
  values.resize(std::max(values.size(), count), values.back());
  return values;
}

class MlaDecodeProblem : public Problem {
 public:
  MlaDecodeProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        heads_(line.integer("heads", 16)),
        kv_lora_rank_(line.integer("kv_lora_rank", 512)),
        rope_dim_(line.integer("rope", 64)) {
    const auto batch = static_cast<std::size_t>(line.integer("batch", 1));
    const std::vector<std::int64_t> kv = line.integers("kv", {4096}, {0});
    const std::vector<std::int64_t> q = line.integers("q", {1}, {0});
    const std::size_t requests = std::max({batch, kv.size(), q.size()});
    query_start_loc_ = running_sum(broadcast(q, requests));
    const std::vector<std::int64_t> seq_lens = broadcast(kv, requests);
    const KvFormat format = latent_format(
        line.word("cache", name_of(line.dtype()), kv_format_names()), kv_lora_rank_, rope_dim_);
    const std::int64_t pad = line.integer("pad", 0, {0});
    // The width of a head of the models that this shape comes from.
    sm_scale_ = 1.0f / std::sqrt(static_cast<float>(kv_lora_rank_ / 4 + rope_dim_));
    rules_ = read_decode_rules(ctx, line, heads_, query_start_loc_, random_);

    const std::int64_t row = kv_lora_rank_ + rope_dim_;
    sequences_ = make_cached_sequences(ctx, {format, line.integer("block_size", 64), pad}, seq_lens,
                                       random_);
    std::vector<std::int64_t> first_keys;
    for (std::size_t i = 0; i < requests; ++i) {
      first_keys.push_back(rules_.first_key(queries(i), seq_lens[i]));
      sequences_.hide_before(i, first_keys.back());
    }
    sequences_.fill(ctx, first_keys, seq_lens, random_);
    tokens_ = query_start_loc_.back() + line.integer("padding", 0, {0});
    const double q_stddev = kScoreStddev / (std::sqrt(static_cast<double>(row)) * sm_scale_);
    q_latent_ =
        normal_array(ctx, {line.dtype(), {tokens_, heads_, kv_lora_rank_}, pad}, random_, q_stddev);
    q_pe_ = normal_array(ctx, {line.dtype(), {tokens_, heads_, rope_dim_}, pad}, random_, q_stddev);
    out_ = poisoned_array(
        ctx, {line.dtype_value("out", line.dtype()), {tokens_, heads_, kv_lora_rank_}, pad});
    if (has_lse(line)) lse_ = poisoned_array(ctx, {DType::f32, {heads_, tokens_}, pad});
    schedule_ = schedule_decode(query_start_loc_, to_int32(seq_lens), ctx.plan_target,
                                rules_.variant, rules_.draft_tree);
    params_ = {.q_latent = q_latent_.view,
               .q_pe = q_pe_.view,
               .cache = &sequences_.cache,
               .block_table = sequences_.table(),
               .out = out_.view,
               .lse = lse_.view,
               .schedule = &schedule_,
               .variant = rules_.variant,
               .sm_scale = sm_scale_,
               .sinks = rules_.sinks.view,
               .q_scale = 0.f};
    reserve_poisoned(ctx, workspace_bytes(ctx, params_));
  }
  void prepare() override {
    prepared_ = Tensor::empty(DType::u8, {workspace_bytes(ctx_, params_)}, ctx_.memory);
    params_.prepared = prepared_;
    fovea::prepare(ctx_, params_);
  }
  void run() override { mla_decode(ctx_, params_); }
  Work work() const override {
    Work work;
    const double q_bytes = static_cast<double>(bytes_of(q_latent_.view.dtype, 1));
    const double out_bytes = static_cast<double>(bytes_of(out_.view.dtype, 1));
    const auto row = static_cast<double>(kv_lora_rank_ + rope_dim_);
    const auto heads = static_cast<double>(heads_);
    for (std::size_t i = 0; i < sequences_.lens.size(); ++i) {
      const std::int64_t keys = sequences_.lens[i];
      work.flops += 2 * heads * rules_.visible_pairs(query_start_loc_[i], queries(i), keys) *
                    (row + static_cast<double>(kv_lora_rank_));
      work.bytes += static_cast<double>((keys - rules_.first_key(queries(i), keys)) *
                                        sequences_.cache.format().row_bytes());
    }
    work.bytes += static_cast<double>(query_start_loc_.back()) * heads *
                  (row * q_bytes + static_cast<double>(kv_lora_rank_) * out_bytes);
    return work;
  }
  CheckResult check() const override {
    const std::int64_t row = kv_lora_rank_ + rope_dim_;
    const std::vector<double> q =
        join_rows(q_latent_.values(), kv_lora_rank_, q_pe_.values(), rope_dim_);
    const std::vector<double> sinks = rules_.sink_values();
    RaggedResult expected(tokens_, heads_, kv_lora_rank_);
    for (std::size_t i = 0; i < sequences_.lens.size(); ++i) {
      const std::vector<double> k = sequences_.rows(i, 0, sequences_.lens[i]);
      std::vector<double> v;
      for (std::int64_t r = 0; r < sequences_.lens[i]; ++r) {
        v.insert(v.end(), k.begin() + r * row, k.begin() + r * row + kv_lora_rank_);
      }
      const std::int64_t begin = query_start_loc_[i], end = query_start_loc_[i + 1];
      if (begin == end) continue;
      const std::vector<double> query = slice(q, begin * heads_ * row, end * heads_ * row);
      oracle::Attention problem = rules_.problem(end - begin, sequences_.lens[i]);
      problem.num_heads = heads_;
      problem.num_kv_heads = 1;
      problem.qk_dim = row;
      problem.v_dim = kv_lora_rank_;
      problem.sm_scale = sm_scale_;
      problem.sinks = sinks;
      problem.draft_tree = rules_.tree_of(begin, end);
      problem.q = query;
      problem.k = k;
      problem.v = v;
      expected.place(oracle::attention(problem), begin);
    }
    return expected.check(out_, lse_, attention_limit(q_latent_.view.dtype));
  }

 private:
  std::int64_t queries(std::size_t i) const {
    return query_start_loc_[i + 1] - query_start_loc_[i];
  }

  const OpContext& ctx_;
  Random random_;
  std::int64_t heads_;
  std::int64_t kv_lora_rank_;
  std::int64_t rope_dim_;
  std::int64_t tokens_ = 0;  ///< Padding rows included.
  float sm_scale_ = 0;
  std::vector<std::int32_t> query_start_loc_;
  Rules rules_;
  CachedSequences sequences_;
  Array q_latent_;
  Array q_pe_;
  Array out_;
  Array lse_;
  DecodeSchedule schedule_;
  MlaDecodeParams params_;
  Tensor prepared_;
};

class AttentionPrefillProblem : public Problem {
 public:
  AttentionPrefillProblem(const CaseLine& line, const OpContext& ctx)
      : ctx_(ctx),
        random_(static_cast<std::uint64_t>(line.integer("seed", 0, {0}))),
        heads_(line.integer("heads", 16)),
        kv_heads_(line.integer("kv_heads", heads_)),
        qk_dim_(line.integer("qk", 192)),
        rope_dim_(line.integer("rope", 0, {0, qk_dim_ - 1})),
        v_dim_(line.integer("v", 128)) {
    const std::vector<std::int64_t> tokens = line.integers("tokens", {2048}, {0});
    const std::vector<std::int64_t> keys =
        broadcast(line.integers("keys", tokens, {0}), tokens.size());
    const std::int64_t pad = line.integer("pad", 0, {0});
    cu_q_ = running_sum(broadcast(tokens, keys.size()));
    cu_k_ = running_sum(keys);
    sm_scale_ = 1.0f / std::sqrt(static_cast<float>(qk_dim_));
    rules_ = read_rules(ctx, line, heads_, random_);
    tokens_ = cu_q_.back() + line.integer("padding", 0, {0});
    const std::int64_t num_keys = cu_k_.back();
    q_ = normal_array(ctx, {line.dtype(), {tokens_, heads_, qk_dim_}, pad}, random_, kScoreStddev);
    k_ = normal_array(ctx, {line.dtype(), {num_keys, kv_heads_, qk_dim_ - rope_dim_}, pad},
                      random_);
    if (rope_dim_ > 0) {
      k_pe_ = normal_array(ctx, {line.dtype(), {num_keys, rope_dim_}, pad}, random_);
    }
    v_ = normal_array(ctx, {line.dtype(), {num_keys, kv_heads_, v_dim_}, pad}, random_);
    out_ = poisoned_array(
        ctx, {line.dtype_value("out", line.dtype()), {tokens_, heads_, v_dim_}, pad});
    if (has_lse(line)) lse_ = poisoned_array(ctx, {DType::f32, {heads_, tokens_}, pad});
    schedule_ = schedule_prefill(cu_q_, cu_k_, ctx.plan_target.prefill_query_tile, rules_.variant);
    params_ = {.q = q_.view,
               .k = k_.view,
               .k_pe = k_pe_.view,
               .v = v_.view,
               .out = out_.view,
               .lse = lse_.view,
               .schedule = &schedule_,
               .variant = rules_.variant,
               .sm_scale = sm_scale_,
               .paged = {},
               .sinks = rules_.sinks.view};
    reserve_poisoned(ctx, workspace_bytes(ctx, params_));
  }
  void run() override { attention_prefill(ctx_, params_); }
  Work work() const override {
    Work work;
    for (std::size_t i = 0; i + 1 < cu_q_.size(); ++i) {
      work.flops +=
          2 * static_cast<double>(heads_ * (qk_dim_ + v_dim_)) *
          rules_.visible_pairs(cu_q_[i], cu_q_[i + 1] - cu_q_[i], cu_k_[i + 1] - cu_k_[i]);
    }
    const std::int64_t inputs = q_.view.numel() + k_.view.numel() + v_.view.numel() +
                                (rope_dim_ > 0 ? k_pe_.view.numel() : 0);
    work.bytes = static_cast<double>(bytes_of(q_.view.dtype, inputs) +
                                     bytes_of(out_.view.dtype, out_.view.numel()));
    return work;
  }
  CheckResult check() const override {
    const std::vector<double> q = q_.values();
    const std::vector<double> k = full_keys();
    const std::vector<double> v = v_.values();
    const std::vector<double> sinks = rules_.sink_values();
    RaggedResult expected(tokens_, heads_, v_dim_);
    for (std::size_t i = 0; i + 1 < cu_q_.size(); ++i) {
      const std::vector<double> queries =
          slice(q, cu_q_[i] * heads_ * qk_dim_, cu_q_[i + 1] * heads_ * qk_dim_);
      const std::vector<double> keys =
          slice(k, cu_k_[i] * kv_heads_ * qk_dim_, cu_k_[i + 1] * kv_heads_ * qk_dim_);
      const std::vector<double> values =
          slice(v, cu_k_[i] * kv_heads_ * v_dim_, cu_k_[i + 1] * kv_heads_ * v_dim_);
      oracle::Attention problem = rules_.problem(cu_q_[i + 1] - cu_q_[i], cu_k_[i + 1] - cu_k_[i]);
      problem.num_heads = heads_;
      problem.num_kv_heads = kv_heads_;
      problem.qk_dim = qk_dim_;
      problem.v_dim = v_dim_;
      problem.sm_scale = sm_scale_;
      problem.sinks = sinks;
      problem.q = queries;
      problem.k = keys;
      problem.v = values;
      expected.place(oracle::attention(problem), cu_q_[i]);
    }
    return expected.check(out_, lse_, attention_limit(q_.view.dtype));
  }

 private:
  /// [keys, kv_heads, qk_dim], the shared channels repeated for every head.
  std::vector<double> full_keys() const {
    if (rope_dim_ == 0) return k_.values();
    const std::vector<double> shared = k_pe_.values();
    std::vector<double> repeated;
    repeated.reserve(shared.size() * static_cast<std::size_t>(kv_heads_));
    for (std::int64_t key = 0; key < cu_k_.back(); ++key) {
      for (std::int64_t h = 0; h < kv_heads_; ++h) {
        repeated.insert(repeated.end(), shared.begin() + key * rope_dim_,
                        shared.begin() + (key + 1) * rope_dim_);
      }
    }
    return join_rows(k_.values(), qk_dim_ - rope_dim_, repeated, rope_dim_);
  }

  const OpContext& ctx_;
  Random random_;
  std::int64_t heads_;
  std::int64_t kv_heads_;
  std::int64_t qk_dim_;
  std::int64_t rope_dim_;
  std::int64_t v_dim_;
  std::int64_t tokens_ = 0;  ///< Padding rows included.
  float sm_scale_ = 0;
  Rules rules_;
  std::vector<std::int32_t> cu_q_;
  std::vector<std::int32_t> cu_k_;
  Array q_;
  Array k_;
  Array k_pe_;
  Array v_;
  Array out_;
  Array lse_;
  PrefillSchedule schedule_;
  AttentionPrefillParams params_;
};

}  // namespace

ProblemPtr make_mla_decode(const CaseLine& line, const OpContext& ctx) {
  return std::make_unique<MlaDecodeProblem>(line, ctx);
}
ProblemPtr make_attention_prefill(const CaseLine& line, const OpContext& ctx) {
  if (line.has("block_size")) return make_paged_attention(line, ctx);
  return std::make_unique<AttentionPrefillProblem>(line, ctx);
}

}  // namespace fovea::cases
