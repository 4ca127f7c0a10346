// What `fovea run` says at its end, as a table and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

struct VerifyReport {
  std::int64_t rows = 0;
  double worst_relative_error = 0;
  double limit = 0;
  std::string worst_row;
  /// A run that verified nothing proves nothing.
  bool passed() const { return rows > 0 && worst_relative_error <= limit; }
};

std::string serve_text(const ServeReport& report);
nlohmann::ordered_json serve_json(const ServeReport& report);

std::string verify_text(const VerifyReport& report);
nlohmann::ordered_json verify_json(const VerifyReport& report);

/// The table and a closing sentence with the ratios that were measured.
std::string compare_text(const std::vector<CompareResult>& results);
nlohmann::ordered_json compare_json(const std::vector<CompareResult>& results);

}  // namespace fovea::cli
