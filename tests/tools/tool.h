// The program as a user meets it: started with arguments, watched from outside.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "model/checkpoint_files.h"

namespace fovea::test {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct ToolResult {
  int exit_code = -1;  ///< 128 + signal where one ended it.
  std::string out;
  std::string err;
};

/// A running `fovea`, its output in files of its own.
class Tool {
 public:
  explicit Tool(const std::vector<std::string>& arguments) {
    std::vector<char*> argv = {const_cast<char*>(FOVEA_PROGRAM)};
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    const std::string out = out_path();
    const std::string err = err_path();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(::open(out.c_str(), O_CREAT | O_WRONLY, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_CREAT | O_WRONLY, 0600), STDERR_FILENO);
      ::execv(FOVEA_PROGRAM, argv.data());
      ::_exit(127);
    }
  }
  ~Tool() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
  }
  Tool(const Tool&) = delete;
  Tool& operator=(const Tool&) = delete;

  void signal(int number) const { ::kill(pid_, number); }
  std::string out_so_far() const { return read_file(out_path()); }
  ToolResult wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out_path()),
            read_file(err_path())};
  }

 private:
  std::string out_path() const { return directory_.path() + "/out"; }
  std::string err_path() const { return directory_.path() + "/err"; }

  TempDir directory_;
  pid_t pid_ = -1;
};

inline ToolResult run_tool(const std::vector<std::string>& arguments) {
  return Tool(arguments).wait();
}

}  // namespace fovea::test
