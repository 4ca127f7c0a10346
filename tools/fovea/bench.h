// What benches of any backend share.
#pragma once

#include <string>
#include <vector>

#include "cases/case_line.h"
#include "cases/problem.h"
#include "options.h"

namespace fovea::cli {

struct BenchArgs {
  std::vector<std::string> suites;
  std::vector<std::string> case_lines;
  std::int64_t rounds = 9;
  double seconds_per_case = 0.05;
  std::int64_t required_percent = 0;
  std::string json_file;
  RuntimeArgs runtime;
};

/// Of the suites and lines that were asked for.
std::vector<cases::CaseLine> collect_cases(const BenchArgs& args);

double median(std::vector<double> values);

/// Throws Error(invalid_argument) for a case that cannot reach the share that is required.
void check_has_work(const BenchArgs& args, const cases::CaseLine& line, const cases::Work& work);
/// A line for a case below the share that is required, else nothing.
std::string complaint(const BenchArgs& args, const std::string& name, double percent);

/// The bench of a GPU; returns the exit code.
int bench_on_device(const BenchArgs& args, const Runtime& runtime);

}  // namespace fovea::cli
