#include "engine/step_runner.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "core/float_bits.h"

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

PagedKvCache allocate_cache(const Model& model, std::int64_t layer, const StepLimits& limits) {
  const KvFormat format{model.dtype(),
                        std::get<MlaLayer>(model.layer(layer).attention).dims().latent_dim()};
  try {
    return PagedKvCache::allocate(
        format, {.num_blocks = limits.num_blocks, .block_size = limits.block_size});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource_exhausted) throw;
    fail(ErrorCode::resource_exhausted,
         "num_blocks is {} of {} tokens, a cache of {} bytes in each of {} layers; it must fit in "
         "memory ({})",
         limits.num_blocks, limits.block_size,
         limits.num_blocks * limits.block_size * format.row_bytes(), model.num_layers(),
         error.what());
  }
}

}  // namespace

StepRunner::StepRunner(const OpContext& ctx, const Model& model, const StepLimits& limits)
    : ctx_(ctx), model_(model), limits_(limits) {
  const AttentionLimits layer_limits{.max_tokens = limits.max_rows,
                                     .max_num_seqs = limits.max_num_seqs,
                                     .workspace_rows = limits.workspace_rows,
                                     .max_seq_len = limits.max_seq_len};
  for (std::int64_t i = 0; i < model.num_layers(); ++i) {
    const MlaLayer& attention = std::get<MlaLayer>(model.layer(i).attention);
    caches_.push_back(allocate_cache(model, i, limits));
    workspace_bytes_ = std::max(workspace_bytes_, attention.workspace_bytes(ctx, layer_limits));
  }
  ctx.workspace->reserve(workspace_bytes_);
  ctx.workspace->reset_peak();

  const std::int64_t H = model.config().hidden_size;
  hidden_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  normed_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  output_ = Tensor::empty(model.dtype(), {limits.max_rows, H});
  const auto max_rows = static_cast<std::size_t>(limits.max_rows);
  token_ids_.reserve(max_rows);
  positions_.reserve(max_rows);
  slots_.reserve(max_rows);
  table_width_ = (limits.max_seq_len + limits.block_size - 1) / limits.block_size;
  block_table_.assign(static_cast<std::size_t>(limits.max_num_seqs * table_width_), -1);
}

std::int64_t StepRunner::cache_bytes() const {
  std::int64_t bytes = 0;
  for (const PagedKvCache& cache : caches_) {
    bytes += PagedKvCache::required_bytes(cache.format(), cache.layout());
  }
  return bytes;
}

StepRunner::Times StepRunner::run(const Workload& workload, std::span<const ScheduledRequest> step,
                                  std::span<StepObserver* const> observers) {
  fill_batch(workload, step);
  fill_hidden(workload);
  PlanOptions options;
  options.context_plan = limits_.context_plan;
  options.workspace_rows = limits_.workspace_rows;
  options.block_size = limits_.block_size;
  plan_ = make_plan(batch_, ctx_.plan_target, options);
  const std::int64_t rows = plan_.num_actual_tokens;
  AttentionStep operands;
  operands.plan = &plan_;
  operands.block_table = block_table();
  operands.slot_mapping = TensorView::of(slots_.data(), {rows});
  operands.positions = TensorView::of(positions_.data(), {rows});
  Times times;
  for (std::int64_t i = 0; i < model_.num_layers(); ++i) {
    const DecoderLayer& layer = model_.layer(i);
    const TensorView normed = normed_.view().slice(0, 0, rows);
    Clock::time_point begin = Clock::now();
    rms_norm(ctx_, {.x = hidden_.view().slice(0, 0, rows),
                    .weight = layer.input_layernorm,
                    .out = normed,
                    .eps = model_.config().rms_norm_eps});
    std::get<MlaLayer>(layer.attention)(ctx_, normed, output_.view().slice(0, 0, rows), operands,
                                        caches_[static_cast<std::size_t>(i)]);
    times.busy_ms += ms_since(begin);

    begin = Clock::now();
    for (StepObserver* observer : observers) observer->on_layer(trace(i, workload));
    times.observer_ms += ms_since(begin);

    begin = Clock::now();
    add_residual(rows);
    times.busy_ms += ms_since(begin);
  }
  ++num_steps_;
  return times;
}

void StepRunner::fill_batch(const Workload& workload, std::span<const ScheduledRequest> step) {
  token_ids_.clear();
  positions_.clear();
  slots_.clear();
  request_of_.clear();
  batch_.query_start_loc.assign(1, 0);
  batch_.seq_lens.clear();
  for (const ScheduledRequest& scheduled : step) {
    const std::int32_t seq_len = scheduled.context_len + scheduled.query_len;
    std::copy(scheduled.blocks.begin(), scheduled.blocks.end(),
              block_table_.begin() + std::ssize(request_of_) * table_width_);
    for (std::int64_t position = scheduled.context_len; position < seq_len; ++position) {
      const std::int64_t block =
          scheduled.blocks[static_cast<std::size_t>(position / limits_.block_size)];
      token_ids_.push_back(
          workload.token_id(scheduled.request, position, model_.config().vocab_size));
      positions_.push_back(position);
      slots_.push_back(block * limits_.block_size + position % limits_.block_size);
    }
    request_of_.push_back(static_cast<std::int32_t>(scheduled.request));
    batch_.seq_lens.push_back(seq_len);
    batch_.query_start_loc.push_back(static_cast<std::int32_t>(positions_.size()));
  }
}

void StepRunner::fill_hidden(const Workload& workload) {
  ctx_.pool->run(std::ssize(token_ids_), [&](std::int64_t row) {
    token_hidden_state(workload.seed, token_ids_[static_cast<std::size_t>(row)],
                       hidden_.view().select(0, row));
  });
}

void StepRunner::add_residual(std::int64_t rows) {
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
  const std::int64_t rows = plan_.num_actual_tokens;
  LayerTrace trace;
  trace.step = num_steps_;
  trace.layer = layer;
  trace.plan = &plan_;
  trace.block_table = block_table();
  trace.cache = &caches_[static_cast<std::size_t>(layer)];
  trace.input = hidden_.view().slice(0, 0, rows);
  trace.output = output_.view().slice(0, 0, rows);
  trace.positions = positions_;
  trace.query_start_loc = batch_.query_start_loc;
  trace.seq_lens = batch_.seq_lens;
  trace.request_of = request_of_;
  trace.workload = &workload;
  return trace;
}

}  // namespace fovea::engine
