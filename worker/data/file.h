// Wrappers of POSIX files whose errors name the path.
//
// A File owns its descriptor. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace remesh::data {

class File {
 public:
  // Opens for reading. NotFound if there is no such file, InvalidArgument if it
  // is not a regular file.
  static Result<File> open_regular(const std::string& path);
  // Creates an empty file, replacing an existing one.
  static Result<File> create(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  Result<uint64_t> size() const;
  // Reads `bytes` bytes, or fewer at the end of the file.
  Result<size_t> read(void* out, size_t bytes);
  Status write(const void* bytes, size_t size);
  // Writes at an offset without changing the position.
  Status write_at(uint64_t offset, const void* bytes, size_t size);
  Status sync();

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

Result<std::string> read_file(const std::string& path, uint64_t max_bytes);
// Makes created and renamed entries of a directory durable.
Status sync_directory(const std::string& path);
Status rename_file(const std::string& from, const std::string& to);

}  // namespace remesh::data
