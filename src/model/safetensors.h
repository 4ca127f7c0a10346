// The safetensors format: an 8-byte little-endian length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/tensor.h"
#include "model/mapped_file.h"

namespace fovea {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< As the format writes it: "BF16", "F8_E4M3".
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< Bytes from the start of the file.
  std::uint64_t end = 0;
};

/// The entries of a whole file's bytes, by name. Throws Error(corrupt_file) that names the file,
/// the tensor and the field unless the file is exactly what its header says: tensors without gaps
/// and overlaps up to the last byte, sizes as dtype and shape have them, no name twice.
std::vector<SafetensorsEntry> read_safetensors_header(std::span<const std::byte> file,
                                                      const std::string& file_name);

/// A mapped file and its entries.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  std::span<const SafetensorsEntry> entries() const { return entries_; }
  /// Null when there is none.
  const SafetensorsEntry* find(std::string_view name) const;
  /// The tensor's bytes in the mapping, at whatever alignment they have: read-only. Throws
  /// Error(unsupported) unless its dtype is f32, f16 or bf16 and its rank at most kMaxRank.
  TensorView view(const SafetensorsEntry& entry) const;

 private:
  MappedFile file_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace fovea
