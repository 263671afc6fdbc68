// MappedFile: a regular file of the user's, read through memory: only the pages
// that are touched are read. What cannot be read, because the storage returns
// an error or the file has become shorter, kills the process (SIGBUS), unless
// load() finds it first.
//
// Threads: any may read.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "proto/base/status.h"

namespace remesh {

class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is not a regular
  // one.
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept
      : path_(std::move(other.path_)),
        bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  // Reads these bytes, so that touching them does not fail for a while. Io if
  // they cannot be read. Does nothing on kernels before 5.14.
  Status load(std::span<const std::byte> bytes) const;
  // The pages that were read are no longer memory of this process; the page
  // cache keeps them for the next read. Others may read meanwhile.
  void release_pages() const;

 private:
  explicit MappedFile(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::span<const std::byte> bytes_;
};

}  // namespace remesh
