#include "linear/lora.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/kernel_time.h"
#include "linear/product.h"

namespace fovea {
namespace {

/// Rows of a segment: A and B are read once for so many.
constexpr std::int64_t kSegmentRows = 24;
/// Columns of a task: with kSegmentRows they are 24 KiB of f32 sums on the stack, a first-level
/// cache.
constexpr std::int64_t kTileColumns = 256;
static_assert(kTileColumns % kPanelColumns == 0);

std::int64_t panels_of(std::int64_t columns) {
  return (columns + kPanelColumns - 1) / kPanelColumns;
}

std::int64_t tiles_of(std::int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

/// [panels, depth, kPanelColumns], see PanelProduct.
Tensor empty_panels(std::int64_t depth, std::int64_t columns) {
  return Tensor::zeros(DType::f32, {panels_of(columns), depth, kPanelColumns});
}

/// Columns first, first + 1, ... of `panels` become `weight` [columns, depth].
void pack(const TensorView& weight, std::int64_t first, const TensorView& panels) {
  for (std::int64_t i = 0; i < weight.shape[0]; ++i) {
    const std::int64_t column = first + i;
    copy(weight.select(0, i),
         panels.select(0, column / kPanelColumns).select(1, column % kPanelColumns));
  }
}

}  // namespace

struct Lora::Scratch {
  std::int32_t* ends;   ///< [adapters + 1] entry a + 1 is the end of adapter a's rows in `order`.
  std::int32_t* order;  ///< [T] rows with an adapter, adapter by adapter.
  std::int64_t pass_rows;  ///< Rows of `order` that are worked on at a time.
  Segment* segments;       ///< [pass_rows]
  float* x;                ///< [pass_rows, in]
  float* low;              ///< [pass_rows, max_rank]
  std::int64_t first_row;  ///< Of the pass, in `order`.
};

Lora::Lora(std::int64_t in_features, std::int64_t out_features, DType dtype,
           std::span<const std::vector<LoraUpdate>> adapters, const MemorySource& memory)
    : in_features_(in_features),
      out_features_(out_features),
      dtype_(dtype),
      adapters_(adapters.size()),
      kernels_(&plain_kernels()),
      memory_(memory) {
  for (std::size_t a = 0; a < adapters.size(); ++a) {
    Adapter& adapter = adapters_[a];
    std::int64_t tiles = 0;
    for (const LoraUpdate& source : adapters[a]) {
      check(a, source);
      const std::int64_t rank = source.weights.a.shape[0];
      adapter.updates.push_back({.first_column = source.first_column,
                                 .columns = source.columns,
                                 .first_rank = adapter.rank,
                                 .rank = rank,
                                 .b = empty_panels(rank, source.columns)});
      adapter.rank += rank;
      tiles += tiles_of(source.columns);
    }
    if (adapter.rank > 0) adapter.a = empty_panels(in_features, adapter.rank);
    max_rank_ = std::max(max_rank_, adapter.rank);
    max_tiles_ = std::max(max_tiles_, tiles);
    for (std::size_t u = 0; u < adapters[a].size(); ++u) {
      load(adapters[a][u], adapter, adapter.updates[u]);
    }
  }
  send();
}

/// Brings the panels to the device, again into the same storage.
void Lora::send() {
  if (memory_.device == Device{}) return;
  std::size_t next = 0;
  const auto send_panels = [&](const Tensor& panels) {
    if (next == device_panels_.size()) {
      device_panels_.push_back(Tensor::copy_of(panels, memory_));
    } else {
      device_panels_[next].assign(panels);
    }
    return device_panels_[next++].ptr<float>();
  };
  std::vector<LoraOnDevice::Adapter> adapters;
  std::vector<LoraOnDevice::Update> updates;
  for (const Adapter& adapter : adapters_) {
    adapters.push_back({.a = adapter.rank > 0 ? send_panels(adapter.a) : nullptr,
                        .rank = adapter.rank,
                        .first_update = std::ssize(updates),
                        .num_updates = std::ssize(adapter.updates)});
    for (const Update& update : adapter.updates) {
      updates.push_back({.b = send_panels(update.b),
                         .first_column = update.first_column,
                         .columns = update.columns,
                         .first_rank = update.first_rank,
                         .rank = update.rank});
    }
  }
  const auto send_table = [&](const auto& table) {
    const auto bytes = static_cast<std::int64_t>(std::as_bytes(std::span(table)).size());
    return Tensor::copy_of(
        TensorView::of(reinterpret_cast<const std::uint8_t*>(table.data()), {bytes}), memory_);
  };
  device_adapters_ = send_table(adapters);
  device_updates_ = send_table(updates);
}

void Lora::check(std::size_t adapter, const LoraUpdate& update) const {
  const LoraWeights& w = update.weights;
  FOVEA_CHECK(w.a && w.a.ndim == 2 && w.a.shape[0] > 0 && w.a.shape[1] == in_features_ &&
                  is_compute_dtype(w.a.dtype),
              invalid_argument, "lora[{}].{}.a is {}, but must be [rank, {}] of f32, f16 or bf16",
              adapter, update.name, to_string(w.a), in_features_);
  FOVEA_CHECK(w.b && w.b.ndim == 2 && w.b.shape[0] == update.columns &&
                  w.b.shape[1] == w.a.shape[0] && is_compute_dtype(w.b.dtype),
              invalid_argument, "lora[{}].{}.b is {}, but must be [{}, {}] of f32, f16 or bf16",
              adapter, update.name, to_string(w.b), update.columns, w.a.shape[0]);
}

void Lora::load(const LoraUpdate& source, Adapter& adapter, const Update& update) const {
  pack(source.weights.a, update.first_rank, adapter.a);
  pack(source.weights.b, 0, update.b);
  float* b = update.b.ptr<float>();
  for (std::int64_t i = 0; i < update.b.view().numel(); ++i) b[i] *= source.weights.scale;
}

void Lora::reload(std::span<const std::vector<LoraUpdate>> adapters) {
  FOVEA_CHECK(adapters.size() == adapters_.size(), invalid_argument,
              "reload with {} adapters, but was made with {}", adapters.size(), adapters_.size());
  for (std::size_t a = 0; a < adapters.size(); ++a) {
    const Adapter& adapter = adapters_[a];
    bool fits = adapters[a].size() == adapter.updates.size();
    for (std::size_t u = 0; fits && u < adapters[a].size(); ++u) {
      check(a, adapters[a][u]);
      fits = adapters[a][u].first_column == adapter.updates[u].first_column &&
             adapters[a][u].columns == adapter.updates[u].columns &&
             adapters[a][u].weights.a.shape[0] == adapter.updates[u].rank;
    }
    FOVEA_CHECK(fits, invalid_argument,
                "reload of lora[{}] with other updates or ranks than it was made with", a);
  }
  for (std::size_t a = 0; a < adapters.size(); ++a) {
    for (std::size_t u = 0; u < adapters[a].size(); ++u) {
      load(adapters[a][u], adapters_[a], adapters_[a].updates[u]);
    }
  }
  send();
}

std::int64_t Lora::weight_bytes() const {
  std::int64_t bytes = 0;
  for (const Adapter& adapter : adapters_) {
    if (adapter.rank > 0) bytes += adapter.a.nbytes();
    for (const Update& update : adapter.updates) bytes += update.b.nbytes();
  }
  return bytes;
}

Lora::Scratch Lora::take(WorkspaceScope& scope, std::int64_t tokens) const {
  const std::int64_t rows = scratch_rows(in_features_ * std::int64_t{sizeof(float)}, tokens);
  Scratch scratch{};
  scratch.ends = scope.take<std::int32_t>(num_adapters() + 1);
  scratch.order = scope.take<std::int32_t>(tokens);
  scratch.pass_rows = rows;
  scratch.segments = scope.take<Segment>(rows);
  scratch.x = scope.take<float>(rows * in_features_);
  scratch.low = scope.take<float>(rows * max_rank_);
  return scratch;
}

std::int64_t Lora::workspace_bytes(std::int64_t tokens) const {
  if (max_rank_ == 0 || tokens == 0 || memory_.device != Device{}) return 0;
  const std::int64_t row_bytes = in_features_ * std::int64_t{sizeof(float)};
  const std::int64_t rows = scratch_rows(row_bytes, tokens);
  const auto bytes = [](std::int64_t count, std::size_t element) {
    return Workspace::rounded(count * static_cast<std::int64_t>(element));
  };
  return bytes(num_adapters() + 1, sizeof(std::int32_t)) + bytes(tokens, sizeof(std::int32_t)) +
         bytes(rows, sizeof(Segment)) + bytes(rows * in_features_, sizeof(float)) +
         bytes(rows * max_rank_, sizeof(float));
}

/// A counting sort of the rows that have an adapter.
void Lora::sort(const TensorView& ids, const Scratch& scratch) const {
  const auto id_of = [&](std::int64_t t) { return *ids.ptr<std::int32_t>({t}); };
  std::fill_n(scratch.ends, num_adapters() + 1, 0);
  // Until rows are placed, entry a + 1 is where the next row of adapter a goes.
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    if (id_of(t) >= 0 && id_of(t) + 1 < num_adapters()) ++scratch.ends[id_of(t) + 2];
  }
  for (std::int64_t a = 1; a <= num_adapters(); ++a) scratch.ends[a] += scratch.ends[a - 1];
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    if (id_of(t) >= 0) scratch.order[scratch.ends[id_of(t) + 1]++] = static_cast<std::int32_t>(t);
  }
}

/// Segments of rows [first, last) of `order`; returns how many.
std::int64_t Lora::cut(std::int64_t first, std::int64_t last, const Scratch& scratch) const {
  std::int64_t count = 0;
  for (std::int64_t a = 0; a < num_adapters(); ++a) {
    const std::int64_t end = std::min<std::int64_t>(scratch.ends[a + 1], last);
    for (std::int64_t begin = std::max<std::int64_t>(scratch.ends[a], first); begin < end;
         begin += kSegmentRows) {
      if (adapters_[static_cast<std::size_t>(a)].rank == 0) break;
      scratch.segments[count++] = {static_cast<std::int32_t>(a), static_cast<std::int32_t>(begin),
                                   static_cast<std::int32_t>(std::min(begin + kSegmentRows, end))};
    }
  }
  return count;
}

/// low = A x for the rows of a segment.
void Lora::project_down(const Segment& segment, const TensorView& x, const Scratch& scratch) const {
  const Adapter& adapter = adapters_[static_cast<std::size_t>(segment.adapter)];
  const std::int64_t first = segment.begin - scratch.first_row;
  for (std::int64_t i = segment.begin; i < segment.end; ++i) {
    const void* row = x.select(0, scratch.order[i]).data;
    float* to = scratch.x + (i - scratch.first_row) * in_features_;
    switch (dtype_) {
      case DType::f16:
        kernels_->widen_f16(row, to, in_features_);
        break;
      case DType::bf16:
        kernels_->widen_bf16(row, to, in_features_);
        break;
      default:
        std::memcpy(to, row, static_cast<std::size_t>(in_features_) * sizeof(float));
    }
  }
  kernels_->multiply_f32({.x = scratch.x + first * in_features_,
                          .x_stride = in_features_,
                          .rows = segment.end - segment.begin,
                          .depth = in_features_,
                          .panels = adapter.a.ptr<float>(),
                          .columns = adapter.rank,
                          .out = scratch.low + first * max_rank_,
                          .out_stride = max_rank_});
}

/// Adds B low in one tile of columns; tiles of an adapter count on over its updates.
void Lora::add_tile(const Segment& segment, std::int64_t tile, const Scratch& scratch,
                    const TensorView& out) const {
  for (const Update& update : adapters_[static_cast<std::size_t>(segment.adapter)].updates) {
    const std::int64_t tiles = tiles_of(update.columns);
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    const std::int64_t begin = tile * kTileColumns;
    const std::int64_t columns = std::min(kTileColumns, update.columns - begin);
    float delta[kSegmentRows * kTileColumns];  // [rows, kTileColumns]
    kernels_->multiply_f32(
        {.x = scratch.low + (segment.begin - scratch.first_row) * max_rank_ + update.first_rank,
         .x_stride = max_rank_,
         .rows = segment.end - segment.begin,
         .depth = update.rank,
         .panels = update.b.ptr<float>() + begin * update.rank,
         .columns = columns,
         .out = delta,
         .out_stride = kTileColumns});
    const auto add = dtype_ == DType::f16    ? kernels_->add_f16
                     : dtype_ == DType::bf16 ? kernels_->add_bf16
                                             : kernels_->add_f32;
    for (std::int64_t i = segment.begin; i < segment.end; ++i) {
      const TensorView row = out.select(0, scratch.order[i]);
      add(delta + (i - segment.begin) * kTileColumns,
          static_cast<std::byte*>(row.data) + bytes_of(dtype_, update.first_column + begin),
          columns);
    }
    return;
  }
}

void Lora::operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& ids,
                      const TensorView& out) const {
  const std::int64_t tokens = x.shape[0];
  if (max_rank_ == 0 || tokens == 0) return;
  const KernelTimer timer;
  if (memory_.device != Device{}) {
    const LoraOnDevice on_device{
        .adapters = static_cast<const LoraOnDevice::Adapter*>(device_adapters_.view().data),
        .updates = static_cast<const LoraOnDevice::Update*>(device_updates_.view().data),
        .num_adapters = num_adapters(),
        .max_rank = max_rank_};
    return add_low_rank(ctx, on_device, x, ids, out);
  }
  WorkspaceScope scope(*ctx.workspace);
  Scratch scratch = take(scope, tokens);
  sort(ids, scratch);
  const std::int64_t rows = scratch.ends[num_adapters()];
  for (std::int64_t first = 0; first < rows; first += scratch.pass_rows) {
    scratch.first_row = first;
    const std::int64_t segments = cut(first, std::min(first + scratch.pass_rows, rows), scratch);
    ctx.pool->run(segments, [&](std::int64_t s) { project_down(scratch.segments[s], x, scratch); });
    ctx.pool->run(segments * max_tiles_, [&](std::int64_t task) {
      add_tile(scratch.segments[task / max_tiles_], task % max_tiles_, scratch, out);
    });
  }
}

}  // namespace fovea
