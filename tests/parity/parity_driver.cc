// Compares attention layers of either kind with what record.py saw transformers' layers do: every
// model that models.txt names, every layer, by prefill at once, by chunked prefill and by decode.
// Wrong scales, pairings, windows and sinks must show, or the comparison is worth nothing.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fovea/error.h"
#include "fovea/model.h"
#include "model/safetensors.h"
#include "support/sequence_runner.h"

namespace fovea {
namespace {

/// Recordings of one layer, in the checkpoint's dtype (input) and f32 (output).
struct Recording {
  TensorView input;   ///< [T, H]
  TensorView output;  ///< [T, H]
};

class Recordings {
 public:
  explicit Recordings(const std::string& directory)
      : file_(directory + "/recordings.safetensors") {}

  Recording of(std::int64_t layer, const std::string& name) const {
    const std::string prefix = "layer." + std::to_string(layer) + "." + name + ".";
    return {view(prefix + "input"), view(prefix + "output")};
  }
  DType dtype() const { return view("layer.0.full.input").dtype; }

 private:
  TensorView view(const std::string& name) const {
    const SafetensorsEntry* entry = file_.find(name);
    if (entry == nullptr) throw Error(ErrorCode::corrupt_file, file_.path() + ": no " + name);
    return file_.view(*entry);
  }

  SafetensorsFile file_;
};

/// The largest |got - expected| / |expected| of all rows; infinite where anything is not finite.
double worst_row(const TensorView& expected, const TensorView& got) {
  const std::int64_t rows = expected.shape[0], width = expected.shape[1];
  const Tensor values = Tensor::empty(DType::f32, {rows, width});
  copy(got, values);
  double worst = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    double error = 0, norm = 0;
    for (std::int64_t c = 0; c < width; ++c) {
      const double want = *expected.ptr<float>({r, c});
      const double difference = *values.ptr<float>({r, c}) - want;
      error += difference * difference;
      norm += want * want;
    }
    const double relative = std::sqrt(error / norm);
    if (!std::isfinite(relative)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, relative);
  }
  return worst;
}

std::vector<std::int64_t> pieces(std::int64_t total, std::int64_t piece) {
  std::vector<std::int64_t> sizes;
  for (; total > 0; total -= piece) sizes.push_back(std::min(total, piece));
  return sizes;
}

class ModelParity {
 public:
  ModelParity(const Runtime& runtime, const std::string& directory)
      : runtime_(runtime), recordings_(directory), model_(load(directory, recordings_)) {}

  /// The worst row of any layer for each way to run; a control is passed when it is above the
  /// limit.
  bool check(const std::string& name) {
    const bool single = model_.dtype() == DType::f32;
    const double limit = single ? 1e-4 : 2e-2;
    bool ok = true;
    auto row = [&](const char* way, double error, bool control) {
      const bool passed = control ? error > limit : error <= limit;
      std::printf("%-24s %-5s %-28s %10.2e  %s %.0e  %s\n", name.c_str(),
                  std::string(name_of(model_.dtype())).c_str(), way, error,
                  control ? "must exceed" : "limit      ", limit, passed ? "ok" : "FAILED");
      ok = ok && passed;
    };
    auto worst = [&](auto&& of_layer) {
      double error = 0;
      for (std::int64_t i = 0; i < model_.num_layers(); ++i) error = std::max(error, of_layer(i));
      return error;
    };
    const ModelConfig& right = model_.config();
    row("prefill", worst([&](std::int64_t i) { return prefill(i, right); }), false);
    row("chunked prefill", worst([&](std::int64_t i) { return chunked(i); }), false);
    row("decode", worst([&](std::int64_t i) { return decode(i, right); }), false);
    if (right.is_mla()) {
      row("decode, full absorption",
          worst([&](std::int64_t i) { return decode(i, right, MlaAbsorption::full); }), false);
    }
    for (const auto& [control, config] : wrong_configs(single)) {
      row(control, worst([&](std::int64_t i) { return prefill(i, config); }), true);
    }
    return ok;
  }

 private:
  using AnyLayer = std::variant<MlaLayer, AttentionLayer>;

  static Model load(const std::string& directory, const Recordings& recordings) {
    Model::Options options;
    options.dtype = recordings.dtype();
    options.max_position = recordings.of(0, "full").input.shape[0];
    Model model = Model::load(directory, options);
    if (model.config().dtype != options.dtype) {
      throw Error(ErrorCode::corrupt_file, directory + ": recorded in another dtype");
    }
    return model;
  }

  /// What must not go unnoticed.
  std::vector<std::pair<const char*, ModelConfig>> wrong_configs(bool single) const {
    const ModelConfig& right = model_.config();
    std::vector<std::pair<const char*, ModelConfig>> result;
    ModelConfig& scale = result.emplace_back("control: another sm_scale", right).second;
    (right.is_mla() ? scale.mla.sm_scale : scale.gqa.sm_scale) *= single ? 1.01f : 1.5f;
    ModelConfig& pairing = result.emplace_back("control: the other pairing", right).second;
    for (KvGroupConfig& group : pairing.groups) {
      const bool neox = group.rope.pairing == RopePairing::neox;
      group.rope.pairing = neox ? RopePairing::interleaved : RopePairing::neox;
    }
    ModelConfig wider = right;
    for (KvGroupConfig& group : wider.groups) {
      if (group.variant.window_left >= 0) ++group.variant.window_left;
    }
    const bool is_windowed =
        std::any_of(right.groups.begin(), right.groups.end(),
                    [](const KvGroupConfig& group) { return group.variant.window_left >= 0; });
    if (is_windowed) result.emplace_back("control: window of one more", wider);
    if (right.sinks) result.emplace_back("control: no sinks", right).second.sinks = false;
    return result;
  }

  const KvGroupConfig& group_of(std::int64_t layer, const ModelConfig& config) const {
    return config.groups[static_cast<std::size_t>(model_.layer(layer).kv_group)];
  }

  AnyLayer make_layer(std::int64_t layer, const ModelConfig& config,
                      MlaAbsorption absorption = MlaAbsorption::two_step) const {
    const auto rotary = std::make_shared<const RotaryEmbedding>(group_of(layer, config).rope);
    if (config.is_mla()) {
      return MlaLayer(config.mla, model_.mla_weights(layer), rotary,
                      {.absorption = absorption, .rms_norm_eps = config.latent_norm_eps});
    }
    AttentionWeights weights = model_.gqa_weights(layer);
    if (!config.sinks) weights.sinks = {};
    return AttentionLayer(config.gqa, weights, rotary,
                          {.qk_norm = config.qk_norm, .rms_norm_eps = config.rms_norm_eps});
  }

  /// Calls fn(SequenceRunner) over `layer`.
  template <class Fn>
  auto with_runner(const AnyLayer& layer, std::int64_t tokens, const test::SequenceOptions& options,
                   Fn&& fn) const {
    return std::visit(
        [&](const auto& attention) {
          test::SequenceRunner runner(runtime_, attention, tokens, options);
          return fn(runner);
        },
        layer);
  }

  double prefill(std::int64_t layer, const ModelConfig& config) const {
    const Recording full = recordings_.of(layer, "full");
    const std::int64_t tokens = full.input.shape[0];
    const Tensor out = Tensor::empty(model_.dtype(), {tokens, full.input.shape[1]});
    const AnyLayer attention = make_layer(layer, config);
    with_runner(attention, tokens, {.variant = group_of(layer, config).variant},
                [&](test::SequenceRunner& runner) { return runner.step(full.input, out); });
    return worst_row(full.output, out);
  }

  /// By the model's own layer.
  double chunked(std::int64_t layer) const {
    const Recording full = recordings_.of(layer, "full");
    const std::int64_t tokens = full.input.shape[0];
    const Tensor out = Tensor::empty(model_.dtype(), {tokens, full.input.shape[1]});
    // Steps of 37 tokens over a workspace of 24 rows: MLA takes up to seven context chunks.
    const std::size_t chunks = with_runner(model_.layer(layer).attention, tokens,
                                           {.block_size = 8,
                                            .workspace_rows = 24,
                                            .variant = group_of(layer, model_.config()).variant},
                                           [&](test::SequenceRunner& runner) {
                                             return runner.run(full.input, out, pieces(tokens, 37));
                                           });
    const bool is_chunked = chunks >= 3 || !model_.config().is_mla();
    return is_chunked ? worst_row(full.output, out) : std::numeric_limits<double>::infinity();
  }

  /// The prefill as recorded, then one token at a time.
  double decode(std::int64_t layer, const ModelConfig& config,
                MlaAbsorption absorption = MlaAbsorption::two_step) const {
    const Recording prompt = recordings_.of(layer, "prefill");
    const Recording answer = recordings_.of(layer, "decode");
    const std::int64_t prompt_tokens = prompt.input.shape[0];
    const std::int64_t answer_tokens = answer.input.shape[0];
    const std::int64_t width = prompt.input.shape[1];
    const Tensor prompt_out = Tensor::empty(model_.dtype(), {prompt_tokens, width});
    const Tensor answer_out = Tensor::empty(model_.dtype(), {answer_tokens, width});
    const AnyLayer attention = make_layer(layer, config, absorption);
    with_runner(attention, prompt_tokens + answer_tokens,
                {.variant = group_of(layer, config).variant}, [&](test::SequenceRunner& runner) {
                  runner.step(prompt.input, prompt_out);
                  return runner.run(answer.input, answer_out, pieces(answer_tokens, 1));
                });
    return std::max(worst_row(prompt.output, prompt_out), worst_row(answer.output, answer_out));
  }

  const Runtime& runtime_;
  Recordings recordings_;
  Model model_;
};

int compare_all(const std::string& directory) {
  std::ifstream list(directory + "/models.txt");
  const Runtime runtime;
  int models = 0, failed = 0;
  std::printf("%-24s %-5s %-28s %10s\n", "model", "dtype", "run", "worst row");
  for (std::string name; std::getline(list, name);) {
    ++models;
    if (!ModelParity(runtime, directory + "/" + name).check(name)) ++failed;
  }
  std::printf("%d models, %d failed\n", models, failed);
  if (models == 0) std::printf("nothing ran: %s/models.txt names no model\n", directory.c_str());
  return models > 0 && failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fovea_parity DIR (that record.py wrote)\n");
    return 2;
  }
  try {
    return fovea::compare_all(argv[1]);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
