#include "engine/step_runner.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "core/kernel_time.h"

namespace fovea::engine {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

PagedKvCache allocate_cache(const OpContext& ctx, const Model& model, const KvFormat& format,
                            const KvCacheLayout& layout) {
  try {
    return PagedKvCache::allocate(format, layout, ctx.memory);
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
      mirror_(ctx),
      graphs_(ctx),
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
    group.slot_rows = Tensor::empty(DType::i64, {limits.max_rows}, ctx.memory);
    if (graphs_.available()) {
      group.table_rows =
          Tensor::empty(DType::i32, {limits.max_num_seqs, table_width_}, ctx.memory);
    }
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
  embedded_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  hidden_ = Tensor::empty(model.dtype(), {limits.max_rows, H}, ctx.memory);
  normed_ = Tensor::empty(model.dtype(), {limits.max_rows, H}, ctx.memory);
  output_ = Tensor::empty(model.dtype(), {limits.max_rows, H}, ctx.memory);
  position_rows_ = Tensor::empty(DType::i64, {limits.max_rows}, ctx.memory);
  if (graphs_.available()) {
    seq_len_rows_ = Tensor::empty(DType::i32, {limits.max_num_seqs}, ctx.memory);
  }
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
          ctx_, model_, latent_format(format, d.kv_lora_rank, d.qk_rope_head_dim, scales), layout);
      continue;
    }
    const GqaDims& d = gqa->dims();
    const KvFormat keys = heads_format(format, d.num_kv_heads, d.head_dim, scales.k_scale);
    if (keys.scales == KvScales::none) {
      const KvFormat rows{.dtype = keys.dtype, .row_elements = d.k_size() + d.v_size()};
      cache.rows = allocate_cache(ctx_, model_, rows, layout);
      cache.columns = GqaCache::columns_of(cache.rows, d);
    } else {
      cache.rows = allocate_cache(ctx_, model_, keys, layout);
      const KvFormat values = heads_format(format, d.num_kv_heads, d.v_head_dim, scales.v_scale);
      cache.columns = {.k = cache.rows, .v = allocate_cache(ctx_, model_, values, layout)};
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
  DecodeStep* const decode = find_decode_step(step);
  const std::int64_t rows = decode ? decode->rows : std::ssize(positions_);
  send_rows(rows);
  if (decode) send_lengths(rows);
  Times times;
  for (std::int64_t i = 0; i < model_.num_layers(); ++i) {
    Clock::time_point begin = Clock::now();
    const std::size_t group = group_of(i);
    if (decode) {
      graphs_.run(*decode, i, [&] { run_layer(i, rows, decode->steps[group]); });
    } else {
      run_layer(i, rows, groups_[group].operands);
    }
    times.busy_ms += ms_since(begin);
    if (observers.empty()) continue;

    finish(times);
    begin = Clock::now();
    const LayerTrace seen = trace(i, workload);
    for (StepObserver* observer : observers) observer->on_layer(seen);
    times.observer_ms += ms_since(begin);
  }
  finish(times);
  ++num_steps_;
  times.step_ms = ms_since(start) - times.observer_ms;
  // A GPU's kernels run while the host goes on: its clock says nothing of them.
  if (ctx_.memory.device.type == Device::Type::cpu) {
    times.kernel_ms = (kernel_seconds - kernel_seconds_before) * 1e3;
  }
  return times;
}

/// Null where the step has more than decodes, or the context no graphs.
DecodeStep* StepRunner::find_decode_step(std::span<const ScheduledRequest> step) {
  const bool decodes = std::ranges::all_of(
      step, [](const ScheduledRequest& scheduled) { return scheduled.query_len == 1; });
  if (!decodes || !graphs_.available()) return nullptr;
  return &graphs_.step_for(std::ssize(step), std::min(limits_.max_num_seqs, limits_.max_rows),
                           [this](std::int64_t rows) { return make_decode_step(rows); });
}

DecodeStep StepRunner::make_decode_step(std::int64_t rows) const {
  DecodeStep step;
  step.rows = rows;
  SequenceBatch batch;
  for (std::int64_t i = 0; i <= rows; ++i) {
    batch.query_start_loc.push_back(static_cast<std::int32_t>(i));
  }
  batch.seq_lens.assign(static_cast<std::size_t>(rows),
                        static_cast<std::int32_t>(limits_.max_seq_len));
  for (const Group& group : groups_) {
    BatchPlan plan = make_plan(batch, ctx_.plan_target, plan_options(group.kv.variant));
    plan.decode.device_seq_lens = seq_len_rows_.ptr<std::int32_t>();
    step.plans.push_back(std::move(plan));
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const BatchPlan& plan = step.plans[g];
    const std::int64_t bytes = std::visit(
        [&](const auto& attention) { return attention.prepared_bytes(ctx_, plan); },
        model_.layer(group.kv.layers.front()).attention);
    step.prepared.push_back(Tensor::empty(DType::u8, {bytes}, ctx_.memory));
    step.steps.push_back({.plan = &plan,
                          .block_table = {.data = group.table_rows.ptr<std::int32_t>(),
                                          .requests = rows,
                                          .width = table_width_,
                                          .stride = table_width_,
                                          .device = ctx_.memory.device},
                          .slot_mapping = group.slot_rows.view().slice(0, 0, rows),
                          .positions = position_rows_.view().slice(0, 0, rows),
                          .prepared = step.prepared.back()});
  }
  return step;
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

PlanOptions StepRunner::plan_options(const AttentionVariant& variant) const {
  PlanOptions options;
  options.variant = variant;
  if (limits_.draft_tokens > 0) {
    options.split.reorder_batch_threshold = static_cast<std::int32_t>(1 + limits_.draft_tokens);
    options.split.support = QueryLenSupport::varlen;
  }
  options.context_plan = limits_.context_plan;
  options.workspace_rows = limits_.workspace_rows;
  options.block_size = limits_.block_size;
  return options;
}

void StepRunner::make_plans() {
  const std::int64_t rows = std::ssize(positions_);
  for (Group& group : groups_) {
    group.plan = make_plan(batch_, ctx_.plan_target, plan_options(group.kv.variant));
    group.operands.plan = &group.plan;
    group.operands.block_table = {group.block_table.data(), batch_.num_reqs(), table_width_,
                                  table_width_};
    group.operands.slot_mapping = group.slot_rows.view().slice(0, 0, rows);
    group.operands.positions = position_rows_.view().slice(0, 0, rows);
  }
}

void StepRunner::fill_hidden(const Workload& workload) {
  ctx_.pool->run(std::ssize(token_ids_), [&](std::int64_t row) {
    token_hidden_state(workload.seed, token_ids_[static_cast<std::size_t>(row)],
                       embedded_.view().select(0, row));
  });
}

/// What the step computes with goes to where it computes.
void StepRunner::send_rows(std::int64_t rows) {
  const std::int64_t own = std::ssize(positions_);
  const auto send = [&](const void* from, const Tensor& to, std::int64_t count) {
    const std::int64_t elements = count * to.view().strides[0];
    copy_bytes(ctx_.memory, to.view().data, from, bytes_of(to.view().dtype, elements),
               ctx_.stream);
  };
  send(embedded_.view().data, hidden_, own);
  positions_.resize(static_cast<std::size_t>(rows), 0);
  send(positions_.data(), position_rows_, rows);
  positions_.resize(static_cast<std::size_t>(own));
  for (Group& group : groups_) {
    group.slots.resize(static_cast<std::size_t>(rows), -1);
    send(group.slots.data(), group.slot_rows, rows);
  }
}

/// Of decodes, for graphs.
void StepRunner::send_lengths(std::int64_t requests) {
  std::vector<std::int32_t>& lengths = batch_.seq_lens;
  const std::size_t own = lengths.size();
  lengths.resize(static_cast<std::size_t>(requests), 0);
  copy_bytes(ctx_.memory, seq_len_rows_.view().data, lengths.data(),
             bytes_of(DType::i32, requests), ctx_.stream);
  lengths.resize(own);
  for (const Group& group : groups_) {
    copy_bytes(ctx_.memory, group.table_rows.view().data, group.block_table.data(),
               bytes_of(DType::i32, requests * table_width_), ctx_.stream);
  }
}

/// A device may still be at work.
void StepRunner::finish(Times& times) const {
  const KernelTimer timer;
  const Clock::time_point begin = Clock::now();
  wait(ctx_);
  times.busy_ms += ms_since(begin);
}

/// output_ = attention(input_layernorm(hidden_)), after what the layer before leaves to be added.
void StepRunner::run_layer(std::int64_t index, std::int64_t rows, const AttentionStep& step) {
  const DecoderLayer& layer = model_.layer(index);
  const TensorView normed = normed_.view().slice(0, 0, rows);
  const TensorView output = output_.view().slice(0, 0, rows);
  if (index > 0) add_output(model_.layer(index - 1), rows);
  if (step.prepared && groups_[group_of(index)].kv.layers.front() == index) prepare(index, step);
  rms_norm(ctx_, {.x = hidden_.view().slice(0, 0, rows),
                  .weight = layer.input_layernorm,
                  .out = normed,
                  .eps = model_.config().rms_norm_eps});
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  if (const auto* mla = std::get_if<MlaLayer>(&layer.attention)) {
    (*mla)(ctx_, normed, output, step, cache.rows);
  } else {
    std::get<AttentionLayer>(layer.attention)(ctx_, normed, output, step, cache.columns);
  }
}

void StepRunner::prepare(std::int64_t index, const AttentionStep& step) const {
  const DecoderLayer& layer = model_.layer(index);
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  if (const auto* mla = std::get_if<MlaLayer>(&layer.attention)) {
    mla->prepare(ctx_, step, cache.rows);
  } else {
    std::get<AttentionLayer>(layer.attention).prepare(ctx_, step, cache.columns);
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
  add_residual(ctx_, {.x = hidden_.view().slice(0, 0, rows),
                      .y = output_.view().slice(0, 0, rows),
                      .scale = model_.config().residual_scale});
}

LayerTrace StepRunner::trace(std::int64_t layer, const Workload& workload) {
  const Group& group = groups_[group_of(layer)];
  const std::int64_t rows = group.plan.num_actual_tokens;
  LayerTrace trace;
  trace.step = num_steps_;
  trace.layer = layer;
  trace.plan = &group.plan;
  trace.block_table = group.operands.block_table;
  const LayerCache& cache = caches_[static_cast<std::size_t>(layer)];
  mirror_.begin_layer();
  trace.cache = mirror_.blocks(cache.rows, trace.block_table);
  if (cache.has_own_values) trace.v_cache = mirror_.blocks(cache.columns.v, trace.block_table);
  trace.input = mirror_.rows(hidden_.view().slice(0, 0, rows));
  trace.output = mirror_.rows(output_.view().slice(0, 0, rows));
  trace.positions = positions_;
  trace.query_start_loc = batch_.query_start_loc;
  trace.seq_lens = batch_.seq_lens;
  trace.num_true_rows = num_true_rows_;
  trace.request_of = request_of_;
  trace.workload = &workload;
  return trace;
}

}  // namespace fovea::engine
