#include "fovea/runtime.h"

#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/backend.h"
#include "backends/cuda/backend.h"
#include "backends/reference/backend.h"
#include "core/check.h"

namespace fovea {
namespace {

/// An option, or where it says "auto" what the environment says; "auto" when neither chooses.
/// `name` is what an error must point at.
struct Choice {
  std::string value;
  std::string name;
};

Choice choose(const std::string& option, const char* option_name, const char* variable) {
  if (option != "auto") return {option, option_name};
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return {"auto", option_name};
  return {value, variable};
}

std::string_view pick_backend(const Choice& choice) {
  if (choice.value == "auto") return "cpu";
  for (std::string_view known : {"cpu", "reference", "cuda"}) {
    if (choice.value == known) return known;
  }
  fail(ErrorCode::invalid_argument, "{} is \"{}\"; it must be auto, cpu, reference or cuda",
       choice.name, choice.value);
}

Isa pick_isa(const Choice& choice) {
  if (choice.value == "auto") return best_isa();
  std::string available;
  for (Isa isa : kIsas) {
    if (cpu_backend(isa)) available += (available.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  for (Isa isa : kIsas) {
    if (choice.value != name_of(isa)) continue;
    FOVEA_CHECK(cpu_backend(isa) != nullptr, unsupported,
                "{} is \"{}\", which this processor ({}) lacks; it must be auto or one of {}",
                choice.name, choice.value, cpu_features(), available);
    return isa;
  }
  fail(ErrorCode::invalid_argument, "{} is \"{}\"; it must be auto, scalar, avx2, avx512, "
       "avx512_bf16 or neon",
       choice.name, choice.value);
}

}  // namespace

struct Runtime::State {
  std::unique_ptr<ThreadPool> owned_pool;
  std::optional<Workspace> workspace;  ///< In the memory that the backend computes in.
  std::vector<const Backend*> backends;
  std::string_view backend;
  std::string isa;
  std::string device_name;
  std::shared_ptr<void> stream;  ///< Its own, or null.
  Tensor fault;                  ///< A DeviceFault that host and device share, or absent.
  OpContext context;

  void use_cuda(const RuntimeOptions& options, const Choice& kernels);
};

void Runtime::State::use_cuda(const RuntimeOptions& options, const Choice& kernels) {
  FOVEA_CHECK(kernels.value == "auto" || kernels.value == "plain", invalid_argument,
              "{} is \"{}\" with backend cuda; it must be auto or plain", kernels.name,
              kernels.value);
  const CudaDevice device = open_cuda_device(options.cuda_device);
  FOVEA_CHECK(!options.own_cuda_stream || options.cuda_stream == nullptr, invalid_argument,
              "own_cuda_stream is set beside cuda_stream; one of the two must not be");
  const bool plain = kernels.value == "plain" || options.batch_invariant;
  backends.push_back(&cuda_backend(plain ? 0 : device.major));
  isa = plain ? "plain" : "sm_" + std::to_string(device.major) + std::to_string(device.minor);
  device_name = device.name + ", " + std::to_string(device.multiprocessors) +
                " multiprocessors, " + std::to_string(device.memory_bytes >> 30) + " GiB";
  context.memory = cuda_memory(options.cuda_device);
  context.host_memory = cuda_host_memory(options.cuda_device);
  if (options.own_cuda_stream) stream = make_cuda_stream(options.cuda_device);
  context.stream = stream ? stream.get() : options.cuda_stream;
  context.l2_bytes = device.l2_bytes;
  if (options.check_device_indices) {
    fault = Tensor::empty(DType::u8, {std::int64_t{sizeof(DeviceFault)}}, context.host_memory);
    context.device_fault = new (fault.view().data) DeviceFault;
  }
  context.plan_target.num_workers = device.multiprocessors;
}

Runtime::Runtime(const RuntimeOptions& options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  FOVEA_CHECK(options.num_threads >= 0, invalid_argument,
              "num_threads is {}; it must be 0 (all processors) or positive", options.num_threads);
  const Choice backend = choose(options.backend, "backend", "FOVEA_BACKEND");
  const Choice isa = choose(options.isa, "isa", "FOVEA_ISA");
  state.backend = pick_backend(backend);
  if (!options.pool) state.owned_pool = make_std_thread_pool(options.num_threads);
  state.context.pool = options.pool ? options.pool : state.owned_pool.get();
  state.context.plan_target.num_workers = state.context.pool->num_threads();
  state.context.plan_target.batch_invariant = options.batch_invariant;
  if (state.backend == "cuda") {
    state.use_cuda(options, isa);
  } else if (state.backend == "cpu") {
    const Isa picked = pick_isa(isa);
    state.backends.push_back(cpu_backend(picked));
    state.isa = name_of(picked);
  } else {
    state.isa = name_of(Isa::scalar);
  }
  // The reference computes on the host.
  if (state.backend != "cuda") state.backends.push_back(&reference_backend());
  state.workspace.emplace(state.context.memory);
  state.context.workspace = &*state.workspace;
  state.context.backends = state.backends;
  // A CPU tile converts its keys and values to f32 for all of its rows: 128 rows reach 60 to 70 %
  // of the FMA peak in prefill of 2048 tokens, 64 rows 53 to 62 %.
  state.context.plan_target.prefill_query_tile = 128;
}

Runtime::~Runtime() = default;

const OpContext& Runtime::context() const { return state_->context; }
std::string_view Runtime::backend() const { return state_->backend; }
std::string_view Runtime::isa() const { return state_->isa; }
std::string_view Runtime::device_name() const { return state_->device_name; }

std::string Runtime::take_device_fault() const {
  const OpContext& ctx = context();
  if (ctx.device_fault == nullptr) return "";
  wait(ctx);
  const DeviceFault found = std::exchange(*ctx.device_fault, DeviceFault{});
  if (found.taken == 0) return "";
  constexpr std::string_view kNames[] = {"slot_mapping", "positions", "seq_lens", "block_table"};
  return std::string(kNames[static_cast<std::size_t>(found.argument)]) + "[" +
         std::to_string(found.index) + "] is " + std::to_string(found.value) +
         ", but must be in [" + std::to_string(found.begin) + ", " + std::to_string(found.end) +
         ")";
}

std::string cpu_features() {
  std::string features;
#if defined(__x86_64__)
  // The builtin takes literals only.
  const struct {
    const char* name;
    bool present;
  } known[] = {
      {"AVX2", __builtin_cpu_supports("avx2") != 0},
      {"FMA", __builtin_cpu_supports("fma") != 0},
      {"F16C", __builtin_cpu_supports("f16c") != 0},
      {"AVX512F", __builtin_cpu_supports("avx512f") != 0},
      {"AVX512BW", __builtin_cpu_supports("avx512bw") != 0},
      {"AVX512DQ", __builtin_cpu_supports("avx512dq") != 0},
      {"AVX512VL", __builtin_cpu_supports("avx512vl") != 0},
      {"AVX512_VNNI", __builtin_cpu_supports("avx512vnni") != 0},
      {"AVX512_BF16", __builtin_cpu_supports("avx512bf16") != 0},
  };
  for (const auto& [name, present] : known) {
    if (present) features += (features.empty() ? "" : " ") + std::string(name);
  }
#elif defined(__aarch64__)
  features = "ASIMD";
#endif
  return features.empty() ? "no vector extensions that fovea uses" : features;
}

}  // namespace fovea
