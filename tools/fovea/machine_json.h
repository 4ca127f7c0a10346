// What a JSON report says about where it was made.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "fovea/runtime.h"

namespace fovea::cli {

/// The processor's name from /proc/cpuinfo; "unknown" where there is none.
std::string processor_name();

/// version, commit, date (UTC), and machine: processor, features, threads, backend, isa.
nlohmann::ordered_json describe_machine(const Runtime& runtime);

/// Writes `json`, indented. Throws Error(invalid_argument) that names the file.
void write_json(const std::string& path, const nlohmann::ordered_json& json);

}  // namespace fovea::cli
