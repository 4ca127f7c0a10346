// A checkpoint directory: model.safetensors, or shards behind model.safetensors.index.json.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/model.h"
#include "model/layer_tensors.h"
#include "model/safetensors.h"

namespace fovea {

/// Tensors by name. Shards are mapped when first asked for, and stay so as long as
/// the checkpoint lives.
class Checkpoint {
 public:
  /// Throws Error(corrupt_file) when neither the file nor the index is there or readable.
  explicit Checkpoint(const std::string& directory);

  /// The file that answers for names: the index, or the one safetensors file.
  const std::string& listing_path() const { return listing_path_; }
  bool has(std::string_view name) const;
  /// Names that begin with `prefix`, in order.
  std::vector<std::string_view> names_below(std::string_view prefix) const;
  /// Throws Error that names file and tensor when it is missing, or has another shape or dtype.
  TensorView tensor(const std::string& name, std::initializer_list<std::int64_t> shape);
  /// A tensor of one element, [1] or a scalar, as [1, 1].
  TensorView one_element(const std::string& name);
  /// The one value of a tensor that is there; NaN when it has another number of them or a dtype
  /// that is none of f32, f16 and bf16.
  float number(const std::string& name);

 private:
  struct Location {
    std::string name;
    std::string file;
  };
  std::vector<Location>::const_iterator lower_bound(std::string_view name) const;
  const SafetensorsFile& open(const std::string& file);
  std::pair<const SafetensorsFile&, const SafetensorsEntry&> entry(const std::string& name);

  std::string directory_;
  std::string listing_path_;
  std::vector<Location> locations_;  ///< By name.
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
};

/// Views of the checkpoint's mappings.
/// Throws Error that names file and tensor: missing, of another shape or dtype, or one that this
/// architecture does not have and that would be ignored.
LayerTensors read_layer(Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer);

}  // namespace fovea
