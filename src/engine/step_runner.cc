#include "engine/step_runner.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "core/float_bits.h"
#include "core/kernel_time.h"

namespace fovea::engine {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// x += scale * y for one row of the model's dtype, rounded once.
template <class T>
void add_row(T* x, const T* y, std::int64_t count, float scale) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = narrow<T>(widen(x[i]) + scale * widen(y[i]));
}

PagedKvCache allocate_cache(const Model& model, const KvFormat& format,
                            const KvCacheLayout& layout) {
  try {
    return PagedKvCache::allocate(format, layout);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource_exhausted) throw;
    fail(ErrorCode::resource_exhausted,
         "num_blocks is {} of {} tokens, a cache of {} bytes in each of {} layers; it must fit in "
         "memory ({})",
         layout.num_blocks, layout.block_size,
         layout.num_blocks * layout.block_size * format.row_bytes(), model.num_layers(),
         error.what());
  }
}

}  // namespace

StepRunner::StepRunner(const OpContext& ctx, const Model& model, const std::vector<KvGroup>& groups,
                       const StepLimits& limits)
    : ctx_(ctx),
      model_(model),
      limits_(limits),
      group_of_layer_(static_cast<std::size_t>(model.num_layers())) {
  const auto max_rows = static_cast<std::size_t>(limits.max_rows);
  table_width_ = (limits.max_seq_len + limits.block_size - 1) / limits.block_size;
  for (const KvGroup& kv : groups) {
    for (const std::int64_t layer : kv.layers) {
      group_of_layer_[static_cast<std::size_t>(layer)] = groups_.size();
    }
    Group& group = groups_.emplace_back();
    group.kv = kv;
    group.block_table.assign(static_cast<std::size_t>(limits.max_num_seqs * table_width_),
                             BlockTable::kNoBlock);
    group.slots.reserve(max_rows);
  }
  make_caches();
  const AttentionLimits layer_limits{.max_tokens = limits.max_rows,
                                     .max_num_seqs = limits.max_num_seqs,
                                     .workspace_rows = limits.workspace_rows,
                                     .max_seq_len = limits.max_seq_len,
                                     .max_decode_query_len = 1 + limits.draft_tokens};
  for (std::int64_t i = 0; i < model.num_layers(); ++i) {
    const std::int64_t bytes = std::visit(
        [&](const auto& attention) { return attention.workspace_bytes(ctx, layer_limits); },
        model.layer(i).attention);
    workspace_bytes_ = std::max(workspace_bytes_, bytes);
  }
  ctx.workspace->reserve(workspace_bytes_);
  ctx.workspace->reset_peak();

  const std::int64_t H = model.config().hidden_size;
  hidden_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  normed_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  output_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  token_ids_.reserve(max_rows);
  positions_.reserve(max_rows);
}

void StepRunner::make_caches() {
  const std::string format =
      limits_.kv_format.empty() ? std::string(name_of(model_.dtype())) : limits_.kv_format;
  const bool has_scale = format.starts_with("fp8_e");  // One for the tensor; others have none.
  for (std::int64_t i = 0; i < model_.num_layers(); ++i) {
    LayerCache& cache = caches_.emplace_back();
    const KvCacheLayout layout{.num_blocks = limits_.num_blocks[group_of(i)],
                               .block_size = limits_.block_size};
    const KvScalePair scales = has_scale ? model_.kv_scales(i) : KvScalePair{};
    const auto* gqa = std::get_if<AttentionLayer>(&model_.layer(i).attention);
    if (gqa == nullptr) {
      const MlaDims& d = std::get<MlaLayer>(model_.layer(i).attention).dims();
      cache.rows = allocate_cache(
          model_, latent_format(format, d.kv_lora_rank, d.qk_rope_head_dim, scales), layout);
      continue;
    }
    const GqaDims& d = gqa->dims();
    const KvFormat keys = heads_format(format, d.num_kv_heads, d.head_dim, scales.k_scale);
    if (keys.scales == KvScales::none) {
      const KvFormat rows{.dtype = keys.dtype, .row_elements = d.k_size() + d.v_size()};
      cache.rows = allocate_cache(model_, rows, layout);
      cache.columns = GqaCache::columns_of(cache.rows, d);
    } else {
      cache.rows = allocate_cache(model_, keys, layout);
      const KvFormat values = heads_format(format, d.num_kv_heads, d.v_head_dim, scales.v_scale);
      cache.columns = {.k = cache.rows, .v = allocate_cache(model_, values, layout)};
      cache.has_own_values = true;
    }
  }
}

std::int64_t StepRunner::block_bytes(std::size_t group) const {
  std::int64_t bytes = 0;
  for (const std::int64_t layer : groups_[group].kv.layers) {
    bytes += limits_.block_size * caches_[static_cast<std::size_t>(layer)].row_bytes();
  }
  return bytes;
}

std::int64_t StepRunner::cache_bytes() const {
  std::int64_t bytes = 0;
  for (const LayerCache& cache : caches_) {
    bytes += cache.rows.num_slots() * cache.row_bytes();
  }
  return bytes;
}

StepRunner::Times StepRunner::run(const Workload& workload, std::span<const ScheduledRequest> step,
                                  std::span<StepObserver* const> observers) {
  const Clock::time_point start = Clock::now();
  const double kernel_seconds_before = kernel_seconds;
  fill_batch(workload, step);
  fill_tables(step);
  fill_hidden(workload);
  make_plans();
  const auto rows = static_cast<std::int64_t>(positions_.size());
  Times times;
  for (std::int64_t i = 0; i < model_.num_layers(); ++i) {
    Clock::time_point begin = Clock::now();
    attend(i, rows);
    times.busy_ms += ms_since(begin);

    begin = Clock::now();
    for (StepObserver* observer : observers) observer->on_layer(trace(i, workload));
    times.observer_ms += ms_since(begin);

    begin = Clock::now();
    add_output(model_.layer(i), rows);
    times.busy_ms += ms_since(begin);
  }
  ++num_steps_;
  times.step_ms = ms_since(start) - times.observer_ms;
  times.kernel_ms = (kernel_seconds - kernel_seconds_before) * 1e3;
  return times;
}

void StepRunner::fill_batch(const Workload& workload, std::span<const ScheduledRequest> step) {
  token_ids_.clear();
  positions_.clear();
  request_of_.clear();
  num_true_rows_.clear();
  batch_.query_start_loc.assign(1, 0);
  batch_.seq_lens.clear();
  const std::int64_t vocab_size = model_.config().vocab_size;
  for (const ScheduledRequest& scheduled : step) {
    const std::int32_t seq_len = scheduled.context_len + scheduled.query_len;
    const std::int64_t true_end = scheduled.context_len + scheduled.num_true_rows();
    for (std::int64_t position = scheduled.context_len; position < seq_len; ++position) {
      const std::int32_t id = workload.token_id(scheduled.request, position, vocab_size);
      token_ids_.push_back(position < true_end ? id : wrong_token(id, vocab_size));
      positions_.push_back(position);
    }
    request_of_.push_back(static_cast<std::int32_t>(scheduled.request));
    num_true_rows_.push_back(scheduled.num_true_rows());
    batch_.seq_lens.push_back(seq_len);
    batch_.query_start_loc.push_back(static_cast<std::int32_t>(positions_.size()));
  }
}

void StepRunner::fill_tables(std::span<const ScheduledRequest> step) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    group.slots.clear();
    auto row = group.block_table.begin();
    for (const ScheduledRequest& scheduled : step) {
      const std::span<const std::int32_t> blocks = scheduled.blocks[g];
      std::copy(blocks.begin(), blocks.end(), row);
      row += table_width_;
      const std::int64_t end = scheduled.context_len + scheduled.query_len;
      for (std::int64_t position = scheduled.context_len; position < end; ++position) {
        const std::int64_t block = blocks[static_cast<std::size_t>(position / limits_.block_size)];
        group.slots.push_back(block * limits_.block_size + position % limits_.block_size);
      }
    }
  }
}

void StepRunner::make_plans() {
  const auto rows = static_cast<std::int64_t>(positions_.size());
  PlanOptions options;
  if (limits_.draft_tokens > 0) {
    options.split.reorder_batch_threshold = static_cast<std::int32_t>(1 + limits_.draft_tokens);
    options.split.support = QueryLenSupport::varlen;
  }
  options.context_plan = limits_.context_plan;
  options.workspace_rows = limits_.workspace_rows;
  options.block_size = limits_.block_size;
  for (Group& group : groups_) {
    options.variant = group.kv.variant;
    group.plan = make_plan(batch_, ctx_.plan_target, options);
    group.operands.plan = &group.plan;
    group.operands.block_table = {group.block_table.data(), batch_.num_reqs(), table_width_,
                                  table_width_};
    group.operands.slot_mapping = TensorView::of(group.slots.data(), {rows});
    group.operands.positions = TensorView::of(positions_.data(), {rows});
  }
}

void StepRunner::fill_hidden(const Workload& workload) {
  ctx_.pool->run(std::ssize(token_ids_), [&](std::int64_t row) {
    token_hidden_state(workload.seed, token_ids_[static_cast<std::size_t>(row)],
                       hidden_.view().select(0, row));
  });
}

/// output_ = attention(input_layernorm(hidden_))
void StepRunner::attend(std::int64_t index, std::int64_t rows) {
  const DecoderLayer& layer = model_.layer(index);
  const TensorView normed = normed_.view().slice(0, 0, rows);
  const TensorView output = output_.view().slice(0, 0, rows);
  rms_norm(ctx_, {.x = hidden_.view().slice(0, 0, rows),
                  .weight = layer.input_layernorm,
                  .out = normed,
                  .eps = model_.config().rms_norm_eps});
  const AttentionStep& operands = groups_[group_of(index)].operands;
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  if (const auto* mla = std::get_if<MlaLayer>(&layer.attention)) {
    (*mla)(ctx_, normed, output, operands, cache.rows);
  } else {
    std::get<AttentionLayer>(layer.attention)(ctx_, normed, output, operands, cache.columns);
  }
}

/// hidden_ += residual_scale * output_, through post_attention_layernorm where there is one.
void StepRunner::add_output(const DecoderLayer& layer, std::int64_t rows) {
  if (layer.post_attention_layernorm) {
    const TensorView output = output_.view().slice(0, 0, rows);
    rms_norm(ctx_, {.x = output,
                    .weight = layer.post_attention_layernorm,
                    .out = output,
                    .eps = model_.config().rms_norm_eps});
  }
  const std::int64_t H = hidden_.view().shape[1];
  const float scale = model_.config().residual_scale;
  const auto add = [&]<class T>(T) {
    ctx_.pool->run(rows, [&](std::int64_t row) {
      add_row(hidden_.ptr<T>({row}), output_.ptr<T>({row}), H, scale);
    });
  };
  switch (model_.dtype()) {
    case DType::f16:
      return add(Float16{});
    case DType::bf16:
      return add(BFloat16{});
    default:
      return add(float{});
  }
}

LayerTrace StepRunner::trace(std::int64_t layer, const Workload& workload) const {
  const Group& group = groups_[group_of(layer)];
  const std::int64_t rows = group.plan.num_actual_tokens;
  LayerTrace trace;
  trace.step = num_steps_;
  trace.layer = layer;
  trace.plan = &group.plan;
  trace.block_table = group.operands.block_table;
  const LayerCache& cache = caches_[static_cast<std::size_t>(layer)];
  trace.cache = &cache.rows;
  if (cache.has_own_values) trace.v_cache = &cache.columns.v;
  trace.input = hidden_.view().slice(0, 0, rows);
  trace.output = output_.view().slice(0, 0, rows);
  trace.positions = positions_;
  trace.query_start_loc = batch_.query_start_loc;
  trace.seq_lens = batch_.seq_lens;
  trace.num_true_rows = num_true_rows_;
  trace.request_of = request_of_;
  trace.workload = &workload;
  return trace;
}

}  // namespace fovea::engine
