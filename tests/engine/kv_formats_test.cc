// Serving with every cache format: verified against float64 on what is stored, in less memory.
#include <gtest/gtest.h>

#include "engine/serving.h"

namespace fovea {
namespace {

Workload small_workload() {
  Workload workload;
  workload.name = "test";
  workload.seed = 5;
  for (std::int32_t i = 0; i < 5; ++i) {
    workload.requests.push_back({.prompt_tokens = 20 + 30 * i, .answer_tokens = 4 + i});
  }
  return workload;
}

/// Prompts come in several chunks, with context; blocks run out.
EngineOptions tight_options(const std::string& kv_format) {
  EngineOptions options;
  options.token_budget = 48;
  options.num_blocks = 20;
  options.kv_format = kv_format;
  return options;
}

class KvFormatServing : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(, KvFormatServing, testing::ValuesIn(kv_format_names()),
                         [](const auto& format) { return std::string(format.param); });

/// One whose rows the format takes.
Model make_latent_model(const std::string& kv_format, std::int64_t num_layers) {
  if (kv_format != "fp8_ds_mla") return test::make_tiny_model({.num_layers = num_layers});
  return test::make_tiny_model({.num_layers = num_layers,
                                .dtype = DType::bf16,
                                .logit_spread = 0.7,
                                .width = 4,
                                .has_full_rows = true});
}

/// `row_bytes` of a token of a layer in the format and in the model's dtype.
void serve_verified(const Model& model, const std::string& kv_format, std::int64_t row_bytes,
                    std::int64_t own_row_bytes) {
  const Runtime runtime({.num_threads = 2});
  const Workload workload = small_workload();
  Engine engine(runtime, model, tight_options(kv_format));
  Verifier verifier(model, 60, 3);
  const ServeReport report = engine.serve(workload, {.observers = {&verifier}, .progress = {}});
  EXPECT_EQ(report.finished, 5);
  EXPECT_GT(verifier.rows(), 20);
  EXPECT_LT(verifier.worst_relative_error(), Verifier::limit(model.dtype()))
      << verifier.worst_row();
  Engine own(runtime, model, tight_options(""));
  EXPECT_EQ(report.cache_bytes * own_row_bytes, own.serve(workload).cache_bytes * row_bytes);
}

TEST_P(KvFormatServing, LatentRowsAreVerified) {
  const std::string name(GetParam());
  const Model model = make_latent_model(name, 2);
  const MlaDims& d = model.config().mla;
  serve_verified(model, name, latent_format(name, d.kv_lora_rank, d.qk_rope_head_dim).row_bytes(),
                 bytes_of(model.dtype(), d.latent_dim()));
}

TEST_P(KvFormatServing, KeysAndValuesOfHeadsAreVerified) {
  const std::string name(GetParam());
  const Model model = test::make_tiny_gqa_model({.num_layers = 1});
  const GqaDims& d = model.config().gqa;
  if (name == "fp8_ds_mla") {
    const Runtime runtime({.num_threads = 1});
    EXPECT_NE(test::error_of(ErrorCode::invalid_argument,
                             [&] { Engine(runtime, model, tight_options(name)); })
                  .find("kv_format is fp8_ds_mla, must be another one for gpt_oss"),
              std::string::npos);
    return;
  }
  serve_verified(model, name,
                 heads_format(name, d.num_kv_heads, d.head_dim).row_bytes() +
                     heads_format(name, d.num_kv_heads, d.v_head_dim).row_bytes(),
                 bytes_of(model.dtype(), d.k_size() + d.v_size()));
}

/// Moves every code of the rows that a step stored to a neighbour.
class CodesOneOff : public StepObserver {
 public:
  void on_layer(const LayerTrace& trace) override {
    const PagedKvCache& cache = *trace.cache;
    const DType dtype = cache.format().dtype;
    const std::byte lowest{static_cast<unsigned char>(dtype == DType::i4 ? 0x11 : 0x01)};
    const std::int64_t bytes = bytes_of(dtype, cache.format().row_elements);
    for (std::size_t i = 0; i < trace.request_of.size(); ++i) {
      const std::int32_t* blocks =
          trace.block_table.data + static_cast<std::int64_t>(i) * trace.block_table.stride;
      for (std::int32_t row = trace.query_start_loc[i]; row < trace.query_start_loc[i + 1]; ++row) {
        const std::int64_t position = trace.positions[static_cast<std::size_t>(row)];
        std::byte* codes = cache.row(blocks[position / cache.block_size()],
                                     position % cache.block_size());
        for (std::int64_t byte = 0; byte < bytes; ++byte) codes[byte] ^= lowest;
      }
    }
  }
};

TEST(KvFormats, CodesThatAreOneOffFailVerification) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 2});
  Workload prompts = small_workload();  // Decodes would see the fault in their outputs too.
  for (RequestSpec& request : prompts.requests) request.answer_tokens = 1;
  for (const char* name :
       {"fp8_e4m3", "fp8_e5m2", "int8_per_token", "fp8_per_token", "int4_per_token"}) {
    Engine engine(runtime, model, tight_options(name));
    CodesOneOff fault;
    Verifier verifier(model, 60, 3);
    engine.serve(prompts, {.observers = {&fault, &verifier}, .progress = {}});
    EXPECT_GT(verifier.worst_relative_error(), 10 * Verifier::limit(DType::f32)) << name;
    EXPECT_NE(verifier.worst_row().find("stored row off by"), std::string::npos)
        << verifier.worst_row();
  }
}

TEST(KvFormats, AnUnknownFormatIsRefusedByName) {
  const Model model = test::make_tiny_model({.num_layers = 1});
  const Runtime runtime({.num_threads = 1});
  Engine engine(runtime, model, tight_options("fp8"));
  EXPECT_NE(test::error_of(ErrorCode::invalid_argument, [&] { engine.serve(small_workload()); })
                .find("KV format is fp8, but must be one of bf16"),
            std::string::npos);
}

TEST_P(KvFormatServing, ScratchDoesNotGrowWithContext) {
  // Beyond cache and plan a step takes the same whatever the format and the context.
  const std::string name(GetParam());
  const auto peak = [&](const Model& model, std::int32_t prompt_tokens) {
    const Runtime runtime({.num_threads = 1});
    Workload workload;
    workload.requests.push_back({.prompt_tokens = prompt_tokens, .answer_tokens = 2});
    EngineOptions options;
    options.token_budget = 32;
    if (model.config().is_mla()) options.workspace_rows = 64;
    options.kv_format = name;
    Engine engine(runtime, model, options);
    return engine.serve(workload).peak_workspace_bytes;
  };
  const Model latent = make_latent_model(name, 1);
  EXPECT_EQ(peak(latent, 200), peak(latent, 600));
  if (name == "fp8_ds_mla") return;  // Rows of latent attention alone.
  const Model grouped = test::make_tiny_gqa_model({.num_layers = 1});
  EXPECT_EQ(peak(grouped, 200), peak(grouped, 600));
}

}  // namespace
}  // namespace fovea
