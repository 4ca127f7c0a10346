// Declares a subcommand's options. What is refused says what it was and what it must be. The parser
// behind it (CLI11) is seen by options.cc and main.cc alone: its header takes longer to compile
// than the rest of the program.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fovea/runtime.h"
#include "fovea/thread_pool.h"

namespace CLI {
class App;
}

namespace fovea::cli {

struct IntegerRange {
  std::int64_t min = 1;
  std::int64_t max = std::numeric_limits<std::int32_t>::max();
};

/// Values keep what they were given where an option is absent. A default that the option itself
/// would accept is shown by --help; any other means "not given".
class Options {
 public:
  explicit Options(CLI::App& app) : app_(app) {}

  void integer(const char* name, std::int64_t& value, const std::string& what,
               IntegerRange range = {});
  /// "1,7,300".
  void integers(const char* name, std::vector<std::int64_t>& values, const std::string& what,
                IntegerRange range = {});
  void seconds(const char* name, double& value, const std::string& what);
  /// From 0 to 1.
  void fraction(const char* name, double& value, const std::string& what);
  void word(const char* name, std::string& value, const std::string& what,
            std::vector<std::string> words);
  /// `type` is what --help calls the value.
  void text(const char* name, std::string& value, const std::string& what, const char* type);
  /// May be given several times.
  void texts(const char* name, std::vector<std::string>& values, const std::string& what,
             const char* type);
  void input_file(const char* name, std::string& value, const std::string& what);
  void output_file(const char* name, std::string& value, const std::string& what);
  void flag(const char* name, bool& value, const std::string& what);
  void exclude(const char* name, const char* other);
  /// `name` is refused without `other`.
  void needs(const char* name, const char* other);

 private:
  CLI::App& app_;
};

/// --threads, --backend and --batch-invariant.
struct RuntimeArgs {
  std::int64_t num_threads = 0;  ///< 0: the processors that this process may use.
  std::string backend = "auto";  ///< FOVEA_BACKEND, else the best here.
  bool batch_invariant = false;
};
void add_runtime_options(Options& options, RuntimeArgs& args);

/// A runtime on a pool that attention and matrix products share.
class ToolRuntime {
 public:
  explicit ToolRuntime(const RuntimeArgs& args, const std::string& isa = "auto");
  Runtime& operator*() const { return *runtime_; }
  Runtime* operator->() const { return runtime_.get(); }

 private:
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace fovea::cli
