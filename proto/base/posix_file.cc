#include "proto/base/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace remesh {

Status os_error(const std::string& what, int err) {
  Status s = errno_error(what, err);
  if (err == EDQUOT || err == EMFILE || err == ENFILE)
    return exhausted(s.message());
  return s;
}

int write_all(int fd, std::span<const std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;  // POSIX allows it for no file we write
    offset += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return 0;
}

PosixFile::PosixFile(int fd, std::string path)
    : fd_(fd), path_(std::move(path)) {}

PosixFile::~PosixFile() {
  if (fd_ >= 0) ::close(fd_);
}

Status PosixFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  if (const int err = write_all(fd_, bytes, offset); err != 0)
    return os_error("write " + path_, err);
  start_writeback(offset, offset + bytes.size());
  return ok_status();
}

Status PosixFile::read_at(uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pread(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error("read " + path_, errno);
    if (n == 0) return corrupt(path_ + ": ends at " + std::to_string(offset));
    offset += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return ok_status();
}

Result<uint64_t> PosixFile::size() {
  struct stat st = {};
  if (::fstat(fd_, &st) != 0) return os_error("stat " + path_, errno);
  return static_cast<uint64_t>(st.st_size);
}

Status PosixFile::truncate(uint64_t size) {
  while (::ftruncate(fd_, static_cast<off_t>(size)) != 0)
    if (errno != EINTR) return os_error("truncate " + path_, errno);
  return ok_status();
}

Status PosixFile::sync() {
  while (::fsync(fd_) != 0)
    if (errno != EINTR) return os_error("fsync " + path_, errno);
  return ok_status();
}

Status PosixFile::close() {
  const int fd = std::exchange(fd_, -1);
  // On Linux EINTR means that the descriptor is closed all the same.
  if (fd >= 0 && ::close(fd) != 0 && errno != EINTR)
    return os_error("close " + path_, errno);
  return ok_status();
}

// Starts the disk on what has been written while more is computed, so that
// sync() finds little left. A hint: errors show at sync().
void PosixFile::start_writeback(uint64_t begin, uint64_t end) {
  if (dirty_begin_ == dirty_end_) dirty_begin_ = dirty_end_ = begin;
  dirty_begin_ = std::min(dirty_begin_, begin);
  dirty_end_ = std::max(dirty_end_, end);
  constexpr uint64_t kEnough = uint64_t{8} << 20;
  if (dirty_end_ - dirty_begin_ < kEnough) return;
  ::sync_file_range(fd_, static_cast<off_t>(dirty_begin_),
                    static_cast<off_t>(dirty_end_ - dirty_begin_),
                    SYNC_FILE_RANGE_WRITE);
  dirty_begin_ = dirty_end_ = end;
}

}  // namespace remesh
