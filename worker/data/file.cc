#include "worker/data/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace remesh::data {

Result<File> File::open_regular(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    if (errno == ENOENT) return not_found(path + ": no such file");
    return errno_error("open " + path, errno);
  }
  File file(fd, path);
  struct stat st;
  if (::fstat(fd, &st) != 0) return errno_error("stat " + path, errno);
  if (!S_ISREG(st.st_mode))
    return invalid_argument(path + ": must be a regular file");
  return file;
}

Result<File> File::create(const std::string& path) {
  const int fd =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return errno_error("create " + path, errno);
  return File(fd, path);
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Result<uint64_t> File::size() const {
  struct stat st;
  if (::fstat(fd_, &st) != 0) return errno_error("stat " + path_, errno);
  return static_cast<uint64_t>(st.st_size);
}

Result<size_t> File::read(void* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t n = ::read(fd_, static_cast<char*>(out) + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("read " + path_, errno);
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

Status File::write(const void* bytes, size_t size) {
  const char* p = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t n = ::write(fd_, p, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("write " + path_, errno);
    p += n;
    size -= static_cast<size_t>(n);
  }
  return ok_status();
}

Status File::write_at(uint64_t offset, const void* bytes, size_t size) {
  const char* p = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t n = ::pwrite(fd_, p, size, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("write " + path_, errno);
    p += n;
    offset += static_cast<uint64_t>(n);
    size -= static_cast<size_t>(n);
  }
  return ok_status();
}

Status File::sync() {
  if (::fsync(fd_) != 0) return errno_error("fsync " + path_, errno);
  return ok_status();
}

Result<std::string> read_file(const std::string& path, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(File file, File::open_regular(path));
  ASSIGN_OR_RETURN(const uint64_t size, file.size());
  if (size > max_bytes)
    return corrupt(fmt::format("{}: {} bytes, expected at most {}", path, size,
                               max_bytes));
  std::string text(size, '\0');
  ASSIGN_OR_RETURN(const size_t got, file.read(text.data(), text.size()));
  text.resize(got);
  return text;
}

Status sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno_error("open " + path, errno);
  const int rc = ::fsync(fd);
  const int err = errno;
  ::close(fd);
  if (rc != 0) return errno_error("fsync " + path, err);
  return ok_status();
}

Status rename_file(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0)
    return errno_error("rename " + from + " to " + to, errno);
  return ok_status();
}

}  // namespace remesh::data
