// InputFile: a regular file of the user's, read from front to back or mapped.
// (What remesh itself writes goes through proto/base/file_system.h.)
//
// It owns its descriptor. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/base/status.h"

namespace remesh::data {

class InputFile {
 public:
  // Opens for reading; not_found when there is no such file, invalid_argument
  // when it is not a regular file.
  static Result<InputFile> open(const std::string& path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  Result<uint64_t> size() const;
  // Reads up to `bytes`; fewer only at the end of the file.
  Result<size_t> read(void* out, size_t bytes);

 private:
  InputFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

}  // namespace remesh::data
