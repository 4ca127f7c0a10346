// model.safetensors.index.json: which file holds which tensor.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fovea {

/// Pairs of tensor name and file name, by tensor name. Throws Error(corrupt_file) on anything but
/// {"weight_map": {text: text}, ...}, on a name that comes twice and on a file name with a path in
/// it, which could lead out of the directory.
std::vector<std::pair<std::string, std::string>> read_shard_index(std::string_view json,
                                                                  const std::string& file_name);

}  // namespace fovea
