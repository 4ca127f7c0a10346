// Sampled rows of every layer against float64.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/check.h"
#include "engine/oracle_weights.h"
#include "engine/random.h"
#include "engine/stored_row_error.h"
#include "fovea/block_pool.h"
#include "fovea/engine.h"

namespace fovea {
namespace {

using engine::relative_error;
using engine::to_doubles;

// Layers stay converted up to this much memory; beyond, each check converts its layer anew.
constexpr std::int64_t kKeptBytes = std::int64_t{4} << 30;

/// Sampled apart, so that few rows of a kind do not drown in many of another.
enum class RowKind : std::size_t { prompt, prompt_end, answer };
constexpr std::size_t kNumKinds = 3;

RowKind kind_of(const RequestSpec& spec, std::int64_t position) {
  if (position < spec.prompt_tokens - 1) return RowKind::prompt;
  return position == spec.prompt_tokens - 1 ? RowKind::prompt_end : RowKind::answer;
}

/// Every n-th row of each kind, from a seeded start.
class RowSampler {
 public:
  RowSampler(std::int64_t rows, std::uint64_t seed, std::int64_t layer) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      phase_[kind] = engine::to_uniform(
          draw(seed, engine::Stream::sample, static_cast<std::uint64_t>(layer), kind));
      quota_[kind] = static_cast<double>(std::max<std::int64_t>(1, rows / kNumKinds));
    }
  }

  /// `counts` are the rows of each kind in the whole run.
  bool take(RowKind kind, const std::array<double, kNumKinds>& counts) {
    const auto i = static_cast<std::size_t>(kind);
    phase_[i] += std::min(1.0, quota_[i] / std::max(1.0, counts[i]));
    if (phase_[i] < 1) return false;
    phase_[i] -= 1;
    return true;
  }

 private:
  std::array<double, kNumKinds> phase_{};
  std::array<double, kNumKinds> quota_{};
};

std::array<double, kNumKinds> count_rows(const Workload& workload) {
  std::array<double, kNumKinds> counts{};
  for (const RequestSpec& spec : workload.requests) {
    if (spec.prompt_tokens < 1 || spec.answer_tokens < 1) continue;
    counts[static_cast<std::size_t>(RowKind::prompt)] += spec.prompt_tokens - 1;
    counts[static_cast<std::size_t>(RowKind::prompt_end)] += 1;
    counts[static_cast<std::size_t>(RowKind::answer)] += spec.answer_tokens - 1;
  }
  return counts;
}

/// A row of a step.
struct Sample {
  std::int64_t row = 0;
  std::int64_t batch_index = 0;
  std::int64_t position = 0;
};

struct Finding {
  double error = -1;  ///< As worst_relative_error.
  std::string text;
};

std::span<const double> row_of(const std::vector<double>& rows, std::size_t row,
                               std::size_t width) {
  return std::span(rows).subspan(row * width, width);
}

/// A prefill's new tokens see each other as they are, where storing them loses anything.
bool reads_fresh_rows(const LayerTrace& trace, std::int64_t request) {
  return trace.cache->format().dtype != trace.input.dtype &&
         request >= trace.plan->split.num_decodes;
}

/// Tokens of a request of the batch that were cached before the step.
std::int64_t context_len(const LayerTrace& trace, std::int64_t request) {
  const auto b = static_cast<std::size_t>(request);
  return trace.seq_lens[b] - (trace.query_start_loc[b + 1] - trace.query_start_loc[b]);
}

/// Of a chunk whose tokens see each other as they are, so many are sampled from: for one all before
/// it are projected in float64.
constexpr std::int64_t kFreshRows = 128;

/// One layer of one step, seen by the oracle.
class LayerCheck {
 public:
  LayerCheck(const engine::OracleLayer& layer, std::span<const double> input_layernorm, double eps,
             const LayerTrace& trace)
      : layer_(layer),
        input_layernorm_(input_layernorm),
        eps_(eps),
        trace_(trace) {}

  /// The worst of some samples.
  Finding check(std::span<const Sample> samples) const {
    const auto H = static_cast<std::size_t>(trace_.input.shape[1]);
    std::vector<double> inputs;
    std::vector<std::int64_t> positions;
    for (const Sample& sample : samples) {
      const std::vector<double> row = to_doubles(trace_.input.select(0, sample.row));
      inputs.insert(inputs.end(), row.begin(), row.end());
      positions.push_back(sample.position);
    }
    const std::vector<double> normed = oracle::rms_norm(inputs, input_layernorm_, eps_);
    const std::vector<double> rows = layer_.stored_rows(normed, positions);
    const std::vector<double> queries = layer_.queries(normed, positions);
    std::vector<double> attended;
    FreshRows fresh = fresh_rows(samples);
    Finding worst;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      std::vector<double> seen = stored_rows(samples[i]);
      const std::size_t row_width = seen.size() / (static_cast<std::size_t>(positions[i]) + 1);
      compare_stored(samples[i], row_of(rows, i, row_width), std::span(seen).last(row_width),
                     worst);
      if (reads_fresh_rows(trace_, samples[i].batch_index)) {
        const std::vector<double>& rows_of_chunk = fresh.at(samples[i].batch_index);
        const std::int64_t context = context_len(trace_, samples[i].batch_index);
        const auto first = seen.begin() + context * static_cast<std::int64_t>(row_width);
        std::copy_n(rows_of_chunk.begin(), seen.end() - first, first);
      }
      const std::vector<double> heads =
          layer_.attention(row_of(queries, i, queries.size() / samples.size()), seen);
      attended.insert(attended.end(), heads.begin(), heads.end());
    }
    const std::vector<double> outputs = layer_.o_proj(attended);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      compare_output(samples[i], row_of(outputs, i, H),
                     to_doubles(trace_.output.select(0, samples[i].row)), worst);
    }
    return worst;
  }

 private:
  /// The sample's sequence up to its own token, from the cache; NaN where its blocks are given
  /// back, so that one given back too early is noticed.
  std::vector<double> stored_rows(const Sample& sample) const {
    const PagedKvCache& cache = *trace_.cache;
    const std::int32_t* blocks =
        trace_.block_table.data + sample.batch_index * trace_.block_table.stride;
    const auto width = static_cast<std::size_t>(
        cache.format().row_elements + (trace_.v_cache ? trace_.v_cache->format().row_elements : 0));
    std::vector<double> rows;
    rows.reserve(static_cast<std::size_t>(sample.position + 1) * width);
    for (std::int64_t position = 0; position <= sample.position; ++position) {
      const std::int32_t block = blocks[position / cache.block_size()];
      if (block == BlockTable::kNoBlock) {
        rows.resize(rows.size() + width, std::numeric_limits<double>::quiet_NaN());
        continue;
      }
      append_row(cache, block, position, rows);
      if (trace_.v_cache) append_row(*trace_.v_cache, block, position, rows);
    }
    return rows;
  }

  static void append_row(const PagedKvCache& cache, std::int32_t block, std::int64_t position,
                         std::vector<double>& rows) {
    const std::vector<double> row =
        oracle::decode_row(cache.row(block, position % cache.block_size()),
                           cache.format().row_elements, engine::oracle_row_format(cache.format()));
    rows.insert(rows.end(), row.begin(), row.end());
  }

  /// Rows of new tokens by request of the batch, from the layer's input: those that samples see as
  /// they are.
  using FreshRows = std::map<std::int64_t, std::vector<double>>;
  FreshRows fresh_rows(std::span<const Sample> samples) const {
    std::map<std::int64_t, std::int64_t> last;  // Position of each request's last sample.
    for (const Sample& sample : samples) {
      if (!reads_fresh_rows(trace_, sample.batch_index)) continue;
      last[sample.batch_index] = std::max(last[sample.batch_index], sample.position);
    }
    FreshRows fresh;
    for (const auto& [request, end] : last) {
      const std::int64_t context = context_len(trace_, request);
      const std::int64_t first_row = trace_.query_start_loc[static_cast<std::size_t>(request)];
      std::vector<double> inputs;
      std::vector<std::int64_t> positions;
      for (std::int64_t position = context; position <= end; ++position) {
        const std::vector<double> row =
            to_doubles(trace_.input.select(0, first_row + position - context));
        inputs.insert(inputs.end(), row.begin(), row.end());
        positions.push_back(position);
      }
      fresh[request] =
          layer_.stored_rows(oracle::rms_norm(inputs, input_layernorm_, eps_), positions);
    }
    return fresh;
  }

  /// Keys, then values, each against what its format makes of it.
  void compare_stored(const Sample& sample, std::span<const double> expected,
                      std::span<const double> stored, Finding& worst) const {
    std::size_t begin = 0;
    for (const PagedKvCache* cache : {trace_.cache, trace_.v_cache}) {
      if (cache == nullptr) continue;
      const auto count = static_cast<std::size_t>(cache->format().row_elements);
      const engine::StoredRowError found = engine::stored_row_error(
          cache->format(), expected.subspan(begin, count), stored.subspan(begin, count));
      if (found.error > worst.error) {
        const std::size_t element = begin + found.element;
        worst.error = found.error;
        worst.text = fmt::format(
            "{}: stored row off by {:.2e} beyond half a step of {}; element {}: expected {:.6g}, "
            "got {:.6g}",
            place_of(sample), found.error, cache->format().name(), element, expected[element],
            stored[element]);
      }
      begin += count;
    }
  }

  std::string place_of(const Sample& sample) const {
    return fmt::format("layer {}, request {}, position {}", trace_.layer,
                       trace_.request_of[static_cast<std::size_t>(sample.batch_index)],
                       sample.position);
  }

  void compare_output(const Sample& sample, std::span<const double> expected,
                      std::span<const double> got, Finding& worst) const {
    const double error = relative_error(expected, got);
    if (error <= worst.error) return;
    worst.error = error;
    std::size_t channel = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      // Negated, so that a NaN is the worst.
      if (!(std::abs(got[i] - expected[i]) <= std::abs(got[channel] - expected[channel]))) {
        channel = i;
      }
    }
    worst.text = fmt::format(
        "{}: output off by {:.2e} of its norm; channel {}: expected {:.6g}, got {:.6g}",
        place_of(sample), error, channel, expected[channel], got[channel]);
  }

  const engine::OracleLayer& layer_;
  std::span<const double> input_layernorm_;
  double eps_;
  const LayerTrace& trace_;
};

}  // namespace

struct Verifier::State {
  std::vector<Sample> pick(const LayerTrace& trace);

  const Model& model;
  std::vector<RowSampler> samplers;                      ///< [layers]
  std::vector<std::optional<engine::OracleLayer>> kept;  ///< [layers]
  bool keeps_weights = false;
  const Workload* workload = nullptr;  ///< That row_counts are of.
  std::array<double, kNumKinds> row_counts{};
  std::int64_t rows = 0;
  Finding worst;
};

std::vector<Sample> Verifier::State::pick(const LayerTrace& trace) {
  if (workload != trace.workload) {
    workload = trace.workload;
    row_counts = count_rows(*workload);
  }
  std::vector<Sample> samples;
  RowSampler& sampler = samplers[static_cast<std::size_t>(trace.layer)];
  for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
    const auto& spec = workload->requests[static_cast<std::size_t>(trace.request_of[i])];
    std::int64_t end = trace.query_start_loc[i] + trace.num_true_rows[i];
    if (reads_fresh_rows(trace, static_cast<std::int64_t>(i))) {
      end = std::min(end, trace.query_start_loc[i] + kFreshRows);
    }
    for (std::int64_t row = trace.query_start_loc[i]; row < end; ++row) {
      const std::int64_t position = trace.positions[static_cast<std::size_t>(row)];
      if (sampler.take(kind_of(spec, position), row_counts)) {
        samples.push_back({row, static_cast<std::int64_t>(i), position});
      }
    }
  }
  return samples;
}

Verifier::Verifier(const Model& model, std::int64_t rows, std::uint64_t seed)
    : state_(new State{model, {}, {}, false, nullptr, {}, 0, {}}) {
  FOVEA_CHECK(rows >= 1, invalid_argument, "rows is {}, must be at least 1", rows);
  std::int64_t bytes = 0;
  for (std::int64_t layer = 0; layer < model.num_layers(); ++layer) {
    state_->samplers.emplace_back(rows, seed, layer);
    const std::int64_t elements = std::visit(
        [](const auto& attention) {
          return attention.weight_bytes() / bytes_of(attention.dtype(), 1);
        },
        model.layer(layer).attention);
    bytes += elements * static_cast<std::int64_t>(sizeof(double));
  }
  state_->kept.resize(static_cast<std::size_t>(model.num_layers()));
  state_->keeps_weights = bytes <= kKeptBytes;
}

Verifier::~Verifier() = default;

void Verifier::on_layer(const LayerTrace& trace) {
  State& s = *state_;
  const std::vector<Sample> samples = s.pick(trace);
  if (samples.empty()) return;
  std::optional<engine::OracleLayer>& oracle = s.kept[static_cast<std::size_t>(trace.layer)];
  if (!oracle) oracle.emplace(s.model, trace.layer);
  const std::vector<double> input_layernorm =
      to_doubles(s.model.input_layernorm(trace.layer));
  const LayerCheck layer(*oracle, input_layernorm, s.model.config().rms_norm_eps, trace);

  // Samples are dealt in turns: neighbours have similar lengths, and so take similar time.
  const std::size_t num_threads =
      std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, samples.size());
  std::vector<Finding> findings(num_threads);
  const auto work = [&](std::size_t thread) {
    std::vector<Sample> own;
    for (std::size_t i = thread; i < samples.size(); i += num_threads) own.push_back(samples[i]);
    findings[thread] = layer.check(own);
  };
  std::vector<std::jthread> threads;
  for (std::size_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(work, thread);
  work(0);
  threads.clear();  // Joins.
  for (Finding& finding : findings) {
    if (finding.error > s.worst.error) s.worst = std::move(finding);
  }
  s.rows += std::ssize(samples);
  if (!s.keeps_weights) oracle.reset();
}

std::int64_t Verifier::rows() const { return state_->rows; }
double Verifier::worst_relative_error() const { return std::max(0.0, state_->worst.error); }
std::string Verifier::worst_row() const { return state_->worst.text; }

double Verifier::limit(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 1e-4;
    case DType::f16:
      return 2e-3;
    case DType::bf16:
      return 1.2e-2;
    default:
      fail(ErrorCode::unsupported, "dtype is {}, must be f32, f16 or bf16", name_of(dtype));
  }
}

}  // namespace fovea
