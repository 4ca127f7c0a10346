// fovea bench --backend cuda: calls inside a CUDA graph, over operands that the L2 cannot hold.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "bench.h"
#include "cases/problem.h"
#include "commands.h"
#include "fovea/device_graph.h"
#include "fovea/error.h"
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
  std::int64_t copies = 0;
  double nodes_per_call = 0;
};

/// So many copies of the operands that a call finds none of its own in the L2.
std::int64_t copies_of(const cases::Work& work, std::int64_t l2_bytes) {
  const double copies = std::ceil(2 * static_cast<double>(l2_bytes) / std::max(work.bytes, 1.0));
  return std::clamp(static_cast<std::int64_t>(copies), std::int64_t{1}, kCalls);
}

DeviceResult time_case(const cases::CaseLine& line, const OpContext& ctx, const BenchArgs& args) {
  std::vector<std::unique_ptr<cases::Problem>> problems;
  problems.push_back(cases::make_problem(line, ctx));
  const cases::Work work = problems.front()->work();
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
  return {.name = line.name(),
          .time_us = time_us,
          .gflops = work.flops / time_us * 1e-3,
          .gbps = work.bytes / time_us * 1e-3,
          .copies = copies,
          .nodes_per_call = static_cast<double>(graph.num_nodes()) / kCalls};
}

}  // namespace

int bench_on_device(const BenchArgs& args, const Runtime& runtime) {
  if (args.required_percent > 0) {
    throw Error(ErrorCode::invalid_argument,
                "--require-percent: the backend is cuda, must be cpu: limits of a GPU are not "
                "measured");
  }
  const JsonFile json_file(args.json_file);
  const InterruptGuard guard;
  fmt::print("{}, isa {}\n\n", runtime.device_name(), runtime.isa());
  nlohmann::ordered_json json = describe_machine(runtime);
  json["cases"] = nlohmann::ordered_json::array();
  Table table({"case", "us", "GFLOP/s", "GB/s", "copies", "nodes per call"});
  for (const cases::CaseLine& line : collect_cases(args)) {
    if (InterruptGuard::requested()) break;
    const DeviceResult result = time_case(line, runtime, args);
    table.add({result.name, format_number(result.time_us), format_number(result.gflops),
               format_number(result.gbps), std::to_string(result.copies),
               format_number(result.nodes_per_call)});
    json["cases"].push_back({{"case", result.name},
                             {"time_us", result.time_us},
                             {"gflops", result.gflops},
                             {"gbps", result.gbps},
                             {"copies", result.copies},
                             {"nodes_per_call", result.nodes_per_call}});
  }
  json["machine"]["clocks"] = device_clocks();  // While the device is still awake.
  fmt::print("{}", table.to_text());
  json_file.write(json);
  return InterruptGuard::requested() ? kExitInterrupted : 0;
}

}  // namespace fovea::cli
