// A file's bytes without reading it whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fovea {

/// A whole regular file, mapped read-only. Not copyable; the mapping lives as long as the object.
class MappedFile {
 public:
  /// Throws Error(corrupt_file) that names the file when it cannot be opened, is empty or is not a
  /// regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(address_), size_};
  }
  std::string_view text() const { return {static_cast<const char*>(address_), size_}; }

 private:
  std::string path_;
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

/// True when `path` exists, whatever it is.
bool file_exists(const std::string& path);

}  // namespace fovea
