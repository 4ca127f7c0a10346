// What a JSON report says about where it was made.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "fovea/machine.h"
#include "fovea/runtime.h"

namespace fovea::cli {

/// The processor's name from /proc/cpuinfo; "unknown" where there is none.
std::string processor_name();

/// Of the first GPU, as nvidia-smi says: "SM 1980 MHz, memory 3201 MHz"; "unknown" without it.
std::string device_clocks();

/// version, commit, date (UTC), and machine: processor, features, threads, backend, isa.
nlohmann::ordered_json describe_machine(const Runtime& runtime);

nlohmann::ordered_json peaks_json(const MachinePeaks& peaks);

/// Where --json writes; an empty path is nowhere.
class JsonFile {
 public:
  /// Throws Error(invalid_argument) that names a file that cannot be written: before the work that
  /// it reports is done. What the file holds stays until write().
  explicit JsonFile(std::string path);
  /// Indented. Throws std::runtime_error that names the file.
  void write(const nlohmann::ordered_json& json) const;

 private:
  std::string path_;
};

}  // namespace fovea::cli
