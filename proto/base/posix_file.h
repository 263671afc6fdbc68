// PosixFile: a File on an open descriptor. Private to this folder.
#pragma once

#include <string>

#include "proto/base/file_system.h"

namespace remesh {

// What failed, with strerror(err); Exhausted for lack of space or memory,
// NotFound for a missing file.
Status os_error(const std::string& what, int err);

// Writes all bytes; returns errno, or 0.
int write_all(int fd, std::span<const std::byte> bytes, uint64_t offset);

class PosixFile final : public File {
 public:
  // Owns `fd`.
  PosixFile(int fd, std::string path);
  ~PosixFile() override;
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override;
  Status read_at(uint64_t offset, std::span<std::byte> bytes) override;
  Result<uint64_t> size() override;
  Status truncate(uint64_t size) override;
  Status sync() override;
  Status close() override;

 private:
  void start_writeback(uint64_t begin, uint64_t end);

  int fd_;
  std::string path_;
  uint64_t dirty_begin_ = 0, dirty_end_ = 0;  // not yet handed to the disk
};

}  // namespace remesh
