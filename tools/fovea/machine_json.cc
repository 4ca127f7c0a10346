#include "machine_json.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "fovea/error.h"

namespace fovea::cli {

std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t value = line.find(": ");
    if (line.starts_with("model name") && value != std::string::npos) return line.substr(value + 2);
  }
  return "unknown";
}

std::string device_clocks() {
  // popen rather than NVML: one more library for two numbers.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(
      popen("nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null", "r"),
      pclose);
  char line[128];
  if (!pipe || !std::fgets(line, sizeof line, pipe.get())) return "unknown";
  const std::string text(line);
  const std::size_t comma = text.find(", ");
  if (comma == std::string::npos) return "unknown";
  return "SM " + text.substr(0, comma) + ", memory " +
         text.substr(comma + 2, text.find('\n') - comma - 2);
}

nlohmann::ordered_json describe_machine(const Runtime& runtime) {
  char date[sizeof "2026-01-31T23:59:59Z"];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  nlohmann::ordered_json json;
  json["version"] = FOVEA_VERSION;
  json["commit"] = FOVEA_COMMIT;
  json["date"] = date;
  json["machine"] = {{"processor", processor_name()},
                     {"features", cpu_features()},
                     {"threads", runtime.num_threads()},
                     {"backend", runtime.backend()},
                     {"isa", runtime.isa()}};
  if (!runtime.device_name().empty()) json["machine"]["device"] = runtime.device_name();
  return json;
}

nlohmann::ordered_json peaks_json(const MachinePeaks& peaks) {
  return {{"f32_fma_gflops", peaks.f32_fma_gflops},
          {"bf16_dot_gflops", peaks.bf16_dot_gflops},
          {"read_gbps", peaks.read_gbps}};
}

JsonFile::JsonFile(std::string path) : path_(std::move(path)) {
  if (path_.empty() || std::ofstream(path_, std::ios::app)) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--json: '{}' cannot be written: {}", path_, std::strerror(errno)));
}

void JsonFile::write(const nlohmann::ordered_json& json) const {
  if (path_.empty()) return;
  std::ofstream file(path_, std::ios::trunc);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) {
    throw std::runtime_error(
        fmt::format("--json: '{}' cannot be written: {}", path_, std::strerror(errno)));
  }
}

}  // namespace fovea::cli
