// Low-rank updates of a projection's rows, by several adapters in one batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/linear.h"
#include "linear/plain_kernels.h"

namespace fovea {

/// What an adapter adds to columns [first_column, first_column + columns) of a projection.
struct LoraUpdate {
  const char* name = "";  ///< For error texts.
  LoraWeights weights;
  std::int64_t first_column = 0;
  std::int64_t columns = 0;
};

/// Adapters in a GPU's memory, as its kernel reads them.
struct LoraOnDevice {
  struct Update {
    const float* b;
    std::int64_t first_column;
    std::int64_t columns;
    std::int64_t first_rank;
    std::int64_t rank;
  };
  struct Adapter {
    const float* a;
    std::int64_t rank;
    std::int64_t first_update;
    std::int64_t num_updates;
  };
  const Adapter* adapters = nullptr;
  const Update* updates = nullptr;
  std::int64_t num_adapters = 0;
  std::int64_t max_rank = 0;
};
/// Ids that are no adapter's change nothing.
void add_low_rank(const ExecutionContext& ctx, const LoraOnDevice& lora, const TensorView& x,
                  const TensorView& ids, const TensorView& out);

/// out[t] += scale * B (A x[t]) of the adapter that row t has. Sums are f32, and so are the
/// weights: beside those of the projection they are few. Immutable but for `reload`.
class Lora {
 public:
  Lora() = default;
  /// `adapters[a]`: the updates of adapter a, of any ranks, their columns apart. Rows of the
  /// projection are of `dtype`. Throws Error(invalid_argument) that names adapter and update.
  Lora(std::int64_t in_features, std::int64_t out_features, DType dtype,
       std::span<const std::vector<LoraUpdate>> adapters, const MemorySource& memory = {});

  /// Whether any adapter has an update.
  explicit operator bool() const { return max_rank_ > 0; }
  std::int64_t num_adapters() const { return static_cast<std::int64_t>(adapters_.size()); }
  std::int64_t weight_bytes() const;

  /// x [T, in] and out [T, out] of the projection's dtype, unit innermost stride, no overlap. ids
  /// [T] i32, each -1 or an adapter; rows with -1 keep their bits.
  void operator()(const ExecutionContext& ctx, const TensorView& x, const TensorView& ids,
                  const TensorView& out) const;
  /// Scratch for T tokens, whatever their ids.
  std::int64_t workspace_bytes(std::int64_t tokens) const;
  /// New values in the same storage. Same adapters, columns and ranks.
  void reload(std::span<const std::vector<LoraUpdate>> adapters);

 private:
  struct Update {
    std::int64_t first_column;
    std::int64_t columns;
    std::int64_t first_rank;  ///< Among all ranks of the adapter.
    std::int64_t rank;
    Tensor b;  ///< f32 panels of B^T times scale: depth rank, `columns` columns.
  };
  struct Adapter {
    std::vector<Update> updates;
    std::int64_t rank = 0;  ///< Of all updates together.
    Tensor a;               ///< f32 panels of all A^T: depth in, `rank` columns.
  };
  /// Rows [begin, end) in the order of adapters, all of one.
  struct Segment {
    std::int32_t adapter;
    std::int32_t begin;
    std::int32_t end;
  };
  struct Scratch;

  void check(std::size_t adapter, const LoraUpdate& update) const;
  void send();
  void load(const LoraUpdate& source, Adapter& adapter, const Update& update) const;
  Scratch take(WorkspaceScope& scope, std::int64_t tokens) const;
  void sort(const TensorView& ids, const Scratch& scratch) const;
  std::int64_t cut(std::int64_t first, std::int64_t last, const Scratch& scratch) const;
  void project_down(const Segment& segment, const TensorView& x, const Scratch& scratch) const;
  void add_tile(const Segment& segment, std::int64_t tile, const Scratch& scratch,
                const TensorView& out) const;

  std::int64_t in_features_ = 0;
  std::int64_t out_features_ = 0;
  DType dtype_ = DType::f32;
  std::int64_t max_rank_ = 0;   ///< Of an adapter.
  std::int64_t max_tiles_ = 0;  ///< Of columns, of an adapter.
  std::vector<Adapter> adapters_;
  const PlainKernels* kernels_ = nullptr;
  // On a GPU, beside what is above.
  MemorySource memory_;
  std::vector<Tensor> device_panels_;
  Tensor device_adapters_;
  Tensor device_updates_;
};

}  // namespace fovea
