// The command line and the results file of the kernels' benches.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/device_array.h"

namespace fovea::cuda::test {

struct BenchOptions {
  bool check = false;
  bool time = false;
  bool sweep = false;    ///< Other geometries are timed too.
  double seconds = 0.3;  ///< Of each timing, at least.
  std::string only;      ///< Part of the names of what is checked and timed.
  std::string json;      ///< A file for the timings; empty: none.
  std::string commit;    ///< For that file.

  bool takes(const std::string& name) const { return name.find(only) != std::string::npos; }
};

/// Ends the program where an option is unknown or lacks its value.
inline BenchOptions parse_options(int argc, char** argv, bool has_sweep) {
  BenchOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (option == "--check") {
      options.check = true;
    } else if (option == "--time") {
      options.time = true;
    } else if (option == "--sweep" && has_sweep) {
      options.time = options.sweep = true;
    } else if (option == "--only" && value) {
      options.only = argv[++i];
    } else if (option == "--json" && value) {
      options.json = argv[++i];
    } else if (option == "--commit" && value) {
      options.commit = argv[++i];
    } else if (option == "--seconds" && value) {
      options.seconds = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "%s: it must be --check, --time, %s--only NAME, --json FILE, --commit ID or "
                   "--seconds S\n",
                   argv[i], has_sweep ? "--sweep, " : "");
      std::exit(2);
    }
  }
  return options;
}

/// `results`: a JSON object each.
inline void write_results(const BenchOptions& options, const std::vector<std::string>& results) {
  if (options.json.empty()) return;
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "properties");
  std::FILE* file = std::fopen(options.json.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "%s cannot be written\n", options.json.c_str());
    std::exit(1);
  }
  std::fprintf(file, "{\n  \"device\": \"%s\",\n  \"commit\": \"%s\",\n  \"results\": [\n",
               device.name, options.commit.c_str());
  for (std::size_t i = 0; i < results.size(); ++i) {
    std::fprintf(file, "    %s%s\n", results[i].c_str(), i + 1 < results.size() ? "," : "");
  }
  std::fprintf(file, "  ]\n}\n");
  std::fclose(file);
}

}  // namespace fovea::cuda::test
