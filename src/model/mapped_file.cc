#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/check.h"

namespace fovea {

namespace {

std::string error_text(int number) { return std::generic_category().message(number); }

/// Closes a descriptor on every way out; a mapping outlives it.
struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a named pipe must fail below instead of waiting for its other end.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  FOVEA_CHECK(file.number >= 0, corrupt_file, "{}: cannot be opened: {}", path, error_text(errno));
  struct stat status {};
  FOVEA_CHECK(::fstat(file.number, &status) == 0, corrupt_file, "{}: {}", path, error_text(errno));
  FOVEA_CHECK(S_ISREG(status.st_mode), corrupt_file, "{}: is not a regular file", path);
  FOVEA_CHECK(status.st_size > 0, corrupt_file, "{}: is empty", path);
  size_ = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
  FOVEA_CHECK(address != MAP_FAILED, corrupt_file, "{}: cannot be mapped: {}", path,
              error_text(errno));
  address_ = address;
}

MappedFile::~MappedFile() {
  if (address_ != nullptr) ::munmap(address_, size_);
}

bool file_exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace fovea
