#include "model/shard_index.h"

#include <algorithm>

#include "core/check.h"
#include "model/json_events.h"

namespace fovea {

namespace {

/// Deeper than any index; keeps the level from growing with a hostile file.
constexpr int kMaxDepth = 16;

class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(const std::string& file_name) : file_name_(file_name) {}

  bool has_weight_map() const { return has_weight_map_; }
  std::vector<std::pair<std::string, std::string>> take_files() { return std::move(files_); }

  void begin_object() override {
    if (in_weight_map() && depth_ == 2) reject_file("an object");
    enter();
  }
  void begin_array() override {
    FOVEA_CHECK(depth_ > 0, corrupt_file, "{}: is a list, but must be a JSON object", file_name_);
    if (in_weight_map()) reject_file("a list");
    enter();
  }
  void end_object() override { --depth_; }
  void end_array() override { --depth_; }

  void key(std::string& name) override {
    if (depth_ == 1) {
      section_is_weight_map_ = name == "weight_map";
      FOVEA_CHECK(!section_is_weight_map_ || !has_weight_map_, corrupt_file,
                  "{}: weight_map is there twice", file_name_);
      has_weight_map_ = has_weight_map_ || section_is_weight_map_;
    } else if (in_weight_map()) {
      name_ = std::move(name);
    }
  }

  void text(std::string& value) override {
    if (depth_ == 0) other("text");
    if (!in_weight_map()) return;
    if (depth_ == 1) reject_file("text");
    const bool plain = !value.empty() && value != "." && value != ".." &&
                       value.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    FOVEA_CHECK(plain, corrupt_file,
                "{}: tensor {} lies in {}, but must lie in a file of the same directory",
                file_name_, printable(name_), printable(value));
    files_.emplace_back(std::move(name_), std::move(value));
  }

  void integer(std::uint64_t) override { other("a number"); }
  void other(std::string_view what) override {
    FOVEA_CHECK(depth_ > 0, corrupt_file, "{}: is {}, but must be a JSON object", file_name_, what);
    if (in_weight_map()) reject_file(what);
  }

 private:
  bool in_weight_map() const { return section_is_weight_map_ && depth_ >= 1; }

  void enter() {
    FOVEA_CHECK(++depth_ <= kMaxDepth, corrupt_file, "{}: JSON nests deeper than {} levels",
                file_name_, kMaxDepth);
  }

  [[noreturn]] void reject_file(std::string_view what) const {
    FOVEA_CHECK(depth_ > 1, corrupt_file,
                "{}: weight_map is {}, but must map tensor names to file names", file_name_, what);
    fail(ErrorCode::corrupt_file, "{}: weight_map names {} for tensor {}, but must name a file",
         file_name_, what, printable(name_));
  }

  const std::string& file_name_;
  std::vector<std::pair<std::string, std::string>> files_;
  std::string name_;
  int depth_ = 0;
  bool section_is_weight_map_ = false;
  bool has_weight_map_ = false;
};

}  // namespace

std::vector<std::pair<std::string, std::string>> read_shard_index(std::string_view json,
                                                                  const std::string& file_name) {
  IndexEvents events(file_name);
  parse_json(json, file_name, events);
  FOVEA_CHECK(events.has_weight_map(), corrupt_file, "{}: has no field weight_map", file_name);
  auto files = events.take_files();
  std::sort(files.begin(), files.end());
  const auto twice = std::adjacent_find(files.begin(), files.end(),
                                        [](auto& a, auto& b) { return a.first == b.first; });
  FOVEA_CHECK(twice == files.end(), corrupt_file, "{}: tensor {} is there twice", file_name,
              printable(twice->first));
  return files;
}

}  // namespace fovea
