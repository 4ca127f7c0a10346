#include "options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "fovea/error.h"
#include "fovea/linear.h"

namespace fovea::cli {
namespace {

// Shorter than a timer's noise, longer than anybody's patience.
constexpr double kMinSeconds = 0.01;
constexpr double kMaxSeconds = 1e6;

/// A check that answers what `text` must be, or nothing when it is that.
template <class Check>
CLI::Validator must_be(Check check) {
  const auto complain = [check](std::string& text) -> std::string {
    const std::string wanted = check(text);
    return wanted.empty() ? "" : fmt::format("was '{}', must be {}", text, wanted);
  };
  return CLI::Validator(complain, "", "");
}

template <class Number>
bool parses(const std::string& text, Number min, Number max) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && value >= min && value <= max;
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> items = {""};
  for (const char c : text) {
    if (c == ',') {
      items.emplace_back();
    } else {
      items.back() += c;
    }
  }
  return items;
}

CLI::Validator integer_in(IntegerRange range) {
  return must_be([range](const std::string& text) -> std::string {
    if (parses(text, range.min, range.max)) return {};
    return fmt::format("an integer from {} to {}", range.min, range.max);
  });
}

}  // namespace

void Options::integer(const char* name, std::int64_t& value, const std::string& what,
                      IntegerRange range) {
  CLI::Option* option = app_.add_option(name, value, what)->check(integer_in(range));
  option->type_name("N");
  if (value >= range.min && value <= range.max) option->capture_default_str();
}

void Options::integers(const char* name, std::vector<std::int64_t>& values, const std::string& what,
                       IntegerRange range) {
  // The parser's own splitting drops empty items.
  const auto complain = [range](std::string& text) -> std::string {
    for (const std::string& item : split_at_commas(text)) {
      if (parses(item, range.min, range.max)) continue;
      return fmt::format("was '{}' in '{}', must be an integer from {} to {}", item, text,
                         range.min, range.max);
    }
    return {};
  };
  const auto store = [&values](const std::string& text) {
    values.clear();
    for (const std::string& item : split_at_commas(text)) values.push_back(std::stoll(item));
  };
  app_.add_option_function<std::string>(name, store, what)
      ->check(CLI::Validator(complain, "", ""))
      ->type_name("N,...");
}

void Options::seconds(const char* name, double& value, const std::string& what) {
  app_.add_option(name, value, what)
      ->check(must_be([](const std::string& text) -> std::string {
        return parses(text, kMinSeconds, kMaxSeconds)
                   ? ""
                   : fmt::format("seconds from {} to {}", kMinSeconds, kMaxSeconds);
      }))
      ->type_name("S")
      ->capture_default_str();
}

void Options::fraction(const char* name, double& value, const std::string& what) {
  app_.add_option(name, value, what)
      ->check(must_be([](const std::string& text) -> std::string {
        return parses(text, 0.0, 1.0) ? "" : "a number from 0 to 1";
      }))
      ->type_name("P")
      ->capture_default_str();
}

void Options::word(const char* name, std::string& value, const std::string& what,
                   std::vector<std::string> words) {
  const bool has_default = std::find(words.begin(), words.end(), value) != words.end();
  CLI::Option* option = app_.add_option(name, value, what);
  option->type_name(fmt::format("{}", fmt::join(words, "|")));
  option->check(must_be([words = std::move(words)](const std::string& text) -> std::string {
    if (std::find(words.begin(), words.end(), text) != words.end()) return {};
    return fmt::format("one of {}", fmt::join(words, ", "));
  }));
  if (has_default) option->capture_default_str();
}

void Options::text(const char* name, std::string& value, const std::string& what,
                   const char* type) {
  CLI::Option* option =
      app_.add_option(name, value, what)->check(must_be([](const std::string& text) -> std::string {
        return text.empty() ? "something" : "";
      }));
  option->type_name(type);
  if (!value.empty()) option->capture_default_str();
}

void Options::texts(const char* name, std::vector<std::string>& values, const std::string& what,
                    const char* type) {
  app_.add_option(name, values, what)->type_name(type)->expected(1)->take_all();
}

void Options::input_file(const char* name, std::string& value, const std::string& what) {
  app_.add_option(name, value, what)
      ->check(must_be([](const std::string& text) -> std::string {
        std::error_code error;
        if (!std::filesystem::is_regular_file(text, error)) return "a file that exists";
        if (std::ifstream(text)) return {};
        return fmt::format("a file that can be read ({})", std::strerror(errno));
      }))
      ->type_name("FILE");
}

void Options::output_file(const char* name, std::string& value, const std::string& what) {
  app_.add_option(name, value, what)
      ->check(must_be([](const std::string& text) -> std::string {
        std::error_code error;
        const std::filesystem::path parent = std::filesystem::path(text).parent_path();
        const bool has_folder = parent.empty() || std::filesystem::is_directory(parent, error);
        if (!text.empty() && has_folder && !std::filesystem::is_directory(text, error)) return {};
        return "a file in a directory that exists";
      }))
      ->type_name("FILE");
}

void Options::flag(const char* name, bool& value, const std::string& what) {
  app_.add_flag(name, value, what);
}

void Options::exclude(const char* name, const char* other) {
  app_.get_option(name)->excludes(app_.get_option(other));
}

void Options::needs(const char* name, const char* other) {
  app_.get_option(name)->needs(app_.get_option(other));
}

void add_runtime_options(Options& options, RuntimeArgs& args) {
  options.integer("--threads", args.num_threads, "Threads (default: all processors)", {1, 4096});
  options.word("--backend", args.backend, "Kernels (default: FOVEA_BACKEND, else the fastest)",
               {"cpu", "reference", "cuda"});
  options.flag("--batch-invariant", args.batch_invariant,
               "Bits of a row depend on its own inputs alone");
}

namespace {

/// A product reads FOVEA_LINEAR when it is made, which some commands never do.
void refuse_unknown_linear() {
  try {
    const Tensor weight = Tensor::zeros(DType::f32, {1, 1});
    const Linear linear(weight, TensorView{});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;
  }
}

}  // namespace

ToolRuntime::ToolRuntime(const RuntimeArgs& args, const std::string& isa)
    : pool_(make_openmp_thread_pool(static_cast<int>(args.num_threads))),
      runtime_(std::make_unique<Runtime>(
          RuntimeOptions{.backend = args.backend,
                         .isa = isa,
                         .pool = pool_.get(),
                         .batch_invariant = args.batch_invariant,
                         .own_cuda_stream = true})) {
  refuse_unknown_linear();
}

}  // namespace fovea::cli
