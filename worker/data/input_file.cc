#include "worker/data/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace remesh::data {

Result<InputFile> InputFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    if (errno == ENOENT) return not_found(path + ": no such file");
    return errno_error("open " + path, errno);
  }
  InputFile file(fd, path);
  struct stat st;
  if (::fstat(fd, &st) != 0) return errno_error("stat " + path, errno);
  if (!S_ISREG(st.st_mode))
    return invalid_argument(path + ": must be a regular file");
  return file;
}

InputFile::InputFile(InputFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<uint64_t> InputFile::size() const {
  struct stat st;
  if (::fstat(fd_, &st) != 0) return errno_error("stat " + path_, errno);
  return static_cast<uint64_t>(st.st_size);
}

Result<size_t> InputFile::read(void* out, size_t bytes) {
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

}  // namespace remesh::data
