// Outputs of answered requests as safetensors files.
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fovea/engine.h"

namespace fovea {

struct Dumper::State {
  void write(std::int64_t request, const std::vector<float>& rows) const;

  const Model& model;
  const Workload& workload;
  std::string directory;
  std::unordered_map<std::int64_t, std::vector<float>> rows;  ///< Of requests not yet answered.
};

Dumper::Dumper(const Model& model, const Workload& workload, std::string directory)
    : state_(new State{model, workload, std::move(directory), {}}) {
  std::error_code error;
  std::filesystem::create_directories(state_->directory, error);
  FOVEA_CHECK(!error, invalid_argument, "dump directory {} cannot be made: {}", state_->directory,
              error.message());
}

Dumper::~Dumper() = default;

void Dumper::on_layer(const LayerTrace& trace) {
  State& s = *state_;
  if (trace.layer != s.model.num_layers() - 1) return;
  const std::int64_t H = trace.output.shape[1];
  for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
    const std::int64_t request = trace.request_of[i];
    const RequestSpec& spec = s.workload.requests[static_cast<std::size_t>(request)];
    const std::int64_t end = trace.query_start_loc[i] + trace.num_true_rows[i];
    for (std::int64_t row = trace.query_start_loc[i]; row < end; ++row) {
      const std::int64_t answer =
          trace.positions[static_cast<std::size_t>(row)] - (spec.prompt_tokens - 1);
      if (answer < 0) continue;
      // Recomputation after a preemption comes by answers that were given already.
      std::vector<float>& rows = s.rows[request];
      if (answer * H != std::ssize(rows)) continue;
      rows.resize(rows.size() + static_cast<std::size_t>(H));
      copy(trace.output.select(0, row), TensorView::of(rows.data() + answer * H, {H}));
      if (answer + 1 < spec.answer_tokens) continue;
      s.write(request, rows);
      s.rows.erase(request);
    }
  }
}

void Dumper::State::write(std::int64_t request, const std::vector<float>& values) const {
  const std::size_t H =
      values.size() /
      static_cast<std::size_t>(workload.requests[static_cast<std::size_t>(request)].answer_tokens);
  std::string header =
      fmt::format(R"({{"output":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})",
                  values.size() / H, H, values.size() * sizeof(float));
  header.resize((header.size() + 7) / 8 * 8, ' ');  // Values start at a multiple of 8 bytes.
  std::uint64_t header_size = header.size();
  const std::string path = fmt::format("{}/request-{:06}.safetensors", directory, request);
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&header_size), sizeof header_size);
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
  file.close();
  FOVEA_CHECK(file.good(), invalid_argument, "{} cannot be written", path);
}

}  // namespace fovea
