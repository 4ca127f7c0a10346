// fovea bench --backend cuda: calls inside a CUDA graph, over operands that the L2 cannot hold.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "bench.h"
#include "case_limits.h"
#include "cases/problem.h"
#include "commands.h"
#include "fovea/device_graph.h"
#include "fovea/error.h"
#include "fovea/machine.h"
#include "interrupt.h"
#include "machine_json.h"
#include "table.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kCalls = 20;    ///< Of a graph.
constexpr std::int64_t kReplays = 10;  ///< Between two looks at the clock, whose cost they share.

struct DeviceResult {
  std::string name;
  double time_us = 0;
  double gflops = 0;
  double gbps = 0;
  Limit limit = Limit::read;
  double percent = 0;
  std::int64_t copies = 0;
  double nodes_per_call = 0;
};

/// So many copies of the operands that a call finds none of its own in the L2.
std::int64_t copies_of(const cases::Work& work, std::int64_t l2_bytes) {
  const double copies = std::ceil(2 * static_cast<double>(l2_bytes) / std::max(work.bytes, 1.0));
  return std::clamp(static_cast<std::int64_t>(copies), std::int64_t{1}, kCalls);
}

DeviceResult time_case(const cases::CaseLine& line, const OpContext& ctx, const BenchArgs& args,
                       const MachinePeaks& peaks) {
  std::vector<std::unique_ptr<cases::Problem>> problems;
  problems.push_back(cases::make_problem(line, ctx));
  const cases::Work work = problems.front()->work();
  check_has_work(args, line, work);
  const std::int64_t copies = copies_of(work, ctx.l2_bytes);
  while (std::ssize(problems) < copies) problems.push_back(cases::make_problem(line, ctx));
  for (const auto& problem : problems) {
    problem->prepare();
    problem->run();  // Loads the kernel, and brings the operands to the device.
  }
  wait(ctx);
  const DeviceGraph graph(ctx, [&] {
    for (std::int64_t i = 0; i < kCalls; ++i) {
      problems[static_cast<std::size_t>(i % copies)]->run();
    }
  });
  graph.launch();
  wait(ctx);

  std::vector<double> us;
  const auto start = Clock::now();
  const std::chrono::duration<double> enough(args.seconds_per_case *
                                             static_cast<double>(args.rounds));
  while (std::ssize(us) < args.rounds || Clock::now() - start < enough) {
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < kReplays; ++i) graph.launch();
    wait(ctx);
    const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
    us.push_back(taken.count() / static_cast<double>(kReplays * kCalls));
    if (InterruptGuard::requested()) break;
  }
  const double time_us = median(us);
  const Limit limit = longest_limit(line, work, peaks);
  return {.name = line.name(),
          .time_us = time_us,
          .gflops = work.flops / time_us * 1e-3,
          .gbps = work.bytes / time_us * 1e-3,
          .limit = limit,
          .percent = 100 * limit_us(limit, work, peaks) / time_us,
          .copies = copies,
          .nodes_per_call = static_cast<double>(graph.num_nodes()) / kCalls};
}

}  // namespace

int bench_on_device(const BenchArgs& args, const Runtime& runtime) {
  const JsonFile json_file(args.json_file);
  const InterruptGuard guard;
  const MachinePeaks peaks = measure_peaks(runtime);
  fmt::print("{}, isa {}\n", runtime.device_name(), runtime.isa());
  fmt::print("limits: {} TFLOP/s of f32 FMA, {} of bf16 products, {} GB/s read from memory\n\n",
             format_number(peaks.f32_fma_gflops * 1e-3),
             format_number(peaks.bf16_dot_gflops * 1e-3), format_number(peaks.read_gbps));
  nlohmann::ordered_json json = describe_machine(runtime);
  json["peaks"] = peaks_json(peaks);
  json["cases"] = nlohmann::ordered_json::array();
  Table table({"case", "us", "GFLOP/s", "GB/s", "limit", "% of limit", "copies", "nodes per call"});
  std::string slow;
  for (const cases::CaseLine& line : collect_cases(args)) {
    if (InterruptGuard::requested()) break;
    const DeviceResult result = time_case(line, runtime, args, peaks);
    table.add({result.name, format_number(result.time_us), format_number(result.gflops),
               format_number(result.gbps), name_of(result.limit), format_number(result.percent),
               std::to_string(result.copies), format_number(result.nodes_per_call)});
    json["cases"].push_back({{"case", result.name},
                             {"time_us", result.time_us},
                             {"gflops", result.gflops},
                             {"gbps", result.gbps},
                             {"limit", name_of(result.limit)},
                             {"percent_of_limit", result.percent},
                             {"copies", result.copies},
                             {"nodes_per_call", result.nodes_per_call}});
    slow += complaint(args, result.name, result.percent);
  }
  json["machine"]["clocks"] = device_clocks();  // While the device is still awake.
  fmt::print("{}{}", table.to_text(), slow);
  json_file.write(json);
  if (InterruptGuard::requested()) return kExitInterrupted;
  return slow.empty() ? 0 : kExitFailure;
}

}  // namespace fovea::cli
