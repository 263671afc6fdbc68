#include "coordinator/rundir/line_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

namespace remesh::rundir {
namespace {

// Reads exactly [begin, end) of fd.
Result<std::string> read_range(int fd, const std::string& path, uint64_t begin,
                               uint64_t end) {
  std::string out(end - begin, '\0');
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = pread(fd, out.data() + done, out.size() - done,
                            static_cast<off_t>(begin + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error(path + ": read", errno);
    if (n == 0) return io_error(path + ": became shorter while being read");
    done += static_cast<size_t>(n);
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<LineFile>> LineFile::open(const std::string& path,
                                                 const Valid& valid) {
  std::unique_ptr<LineFile> file(new LineFile);
  file->path_ = path;
  file->fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file->fd_ < 0) return errno_error(path + ": open", errno);
  RETURN_IF_ERROR(file->repair(valid));
  return file;
}

LineFile::~LineFile() {
  if (fd_ >= 0) close(fd_);
}

Status LineFile::repair(const Valid& valid) {
  struct stat st {};
  if (fstat(fd_, &st) != 0) return errno_error(path_ + ": fstat", errno);
  const auto size = static_cast<uint64_t>(st.st_size);
  // A window of twice the limit contains the last valid line and what follows.
  const uint64_t begin =
      size > 2 * kMaxCutBytes ? size - 2 * kMaxCutBytes : uint64_t{0};
  ASSIGN_OR_RETURN(const std::string text, read_range(fd_, path_, begin, size));
  // `end`: just after the '\n' of the last line that is not rejected yet.
  size_t end = text.rfind('\n') + 1;  // npos + 1 is 0
  while (end > 0) {
    // The line before `end`, without its '\n'.
    const size_t start = end < 2 ? 0 : text.rfind('\n', end - 2) + 1;
    const std::string_view line(text.data() + start, end - 1 - start);
    if (valid(line)) {
      last_line_ = std::string(line);
      break;
    }
    end = start;
  }
  cut_bytes_ = text.size() - end;
  if (cut_bytes_ > kMaxCutBytes) {
    return corrupt(path_ + ": the last " + std::to_string(cut_bytes_) +
                   " bytes are not valid lines, too many for a torn tail; "
                   "repair the file or move it away");
  }
  size_ = size - cut_bytes_;
  if (cut_bytes_ > 0 && ftruncate(fd_, static_cast<off_t>(size_)) != 0) {
    return errno_error(path_ + ": ftruncate", errno);
  }
  return ok_status();
}

Status LineFile::append(std::string_view text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = pwrite(fd_, text.data() + done, text.size() - done,
                             static_cast<off_t>(size_ + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int err = errno;
      // A partial line must not precede the next one.
      if (ftruncate(fd_, static_cast<off_t>(size_)) != 0) {
        return errno_error(path_ + ": ftruncate", errno);
      }
      return errno_error(path_ + ": write", err);
    }
    done += static_cast<size_t>(n);
  }
  size_ += text.size();
  return ok_status();
}

LineTail::LineTail(std::string path, bool from_end) : path_(std::move(path)) {
  struct stat st {};
  if (from_end && stat(path_.c_str(), &st) == 0) {
    offset_ = static_cast<uint64_t>(st.st_size);
  }
}

LineTail::~LineTail() {
  if (fd_ >= 0) close(fd_);
}

std::vector<std::string> LineTail::poll() {
  std::vector<std::string> lines;
  if (fd_ < 0) fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) return lines;
  struct stat st {};
  // A torn tail was removed: discard what was read of it.
  if (fstat(fd_, &st) == 0 && static_cast<uint64_t>(st.st_size) < offset_) {
    offset_ = static_cast<uint64_t>(st.st_size);
    partial_.clear();
  }
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n =
        pread(fd_, buffer, sizeof(buffer), static_cast<off_t>(offset_));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    offset_ += static_cast<uint64_t>(n);
    partial_.append(buffer, static_cast<size_t>(n));
    size_t begin = 0;
    for (size_t at; (at = partial_.find('\n', begin)) != std::string::npos;
         begin = at + 1) {
      lines.push_back(partial_.substr(begin, at - begin));
    }
    partial_.erase(0, begin);
  }
  return lines;
}

std::vector<std::string> read_lines(const std::string& path) {
  return LineTail(path, /*from_end=*/false).poll();
}

std::vector<std::string> read_last_lines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const int64_t size = in.tellg();
  const bool cut = size > kTailBytes;
  in.seekg(cut ? size - kTailBytes : 0);
  std::string line;
  if (cut) std::getline(in, line);  // its beginning is missing
  while (std::getline(in, line) && !in.eof()) lines.push_back(line);
  return lines;
}

}  // namespace remesh::rundir
