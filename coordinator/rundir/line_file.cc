#include "coordinator/rundir/line_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "proto/base/descriptor.h"
#include "proto/base/file_system.h"

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
  file->fd_ =
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file->fd_ < 0) {
    const bool passes = errno != EISDIR;
    Status failed = errno_error(path + ": open", errno);
    return passes ? failed : corrupt(failed.message());
  }
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
  std::string text;
  size_t end = 0;
  // Mostly the first window contains the last valid line and what follows.
  for (uint64_t window = 2 * kMaxCutBytes; end == 0; window *= 8) {
    const uint64_t begin = size > window ? size - window : uint64_t{0};
    ASSIGN_OR_RETURN(text, read_range(fd_, path_, begin, size));
    end = end_of_valid(text, valid);
    if (begin == 0) break;
  }
  cut_bytes_ = text.size() - end;
  if (cut_bytes_ > kMaxCutBytes) {
    if (end == 0)
      return corrupt(path_ + ": none of its " + std::to_string(cut_bytes_) +
                     " bytes is a valid line; repair the file or move it away");
    // More than a crash leaves behind may be of use to somebody.
    RETURN_IF_ERROR(write_file(*posix_file_system(), path_ + ".damaged",
                               std::string_view(text).substr(end)));
  }
  size_ = size - cut_bytes_;
  if (cut_bytes_ > 0 && ftruncate(fd_, static_cast<off_t>(size_)) != 0)
    return errno_error(path_ + ": ftruncate", errno);
  return ok_status();
}

// Just after the last valid line of the text, which becomes last_line(); 0 if
// there is none.
size_t LineFile::end_of_valid(const std::string& text, const Valid& valid) {
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
  return end;
}

// Another coordinator's lines must not be overwritten or cut.
Status LineFile::check_end() {
  if (torn_ && ftruncate(fd_, static_cast<off_t>(size_)) != 0)
    return errno_error(path_ + ": ftruncate", errno);
  torn_ = false;
  struct stat st {};
  if (fstat(fd_, &st) != 0) return errno_error(path_ + ": fstat", errno);
  const auto size = static_cast<uint64_t>(st.st_size);
  if (size == size_) return ok_status();
  return cancelled(fmt::format(
      "{}: it has {} bytes, and this coordinator left it with {}: another one "
      "has written to it",
      path_, size, size_));
}

// The first size_ bytes, durably.
Status LineFile::copy_to(int fd, const std::string& path) const {
  constexpr uint64_t kPiece = 1 << 20;
  for (uint64_t at = 0; at < size_; at += kPiece) {
    ASSIGN_OR_RETURN(const std::string piece,
                     read_range(fd_, path_, at, std::min(size_, at + kPiece)));
    const auto size = static_cast<ssize_t>(piece.size());
    if (pwrite(fd, piece.data(), piece.size(), static_cast<off_t>(at)) != size)
      return errno_error(path + ": write", errno);
  }
  return fdatasync(fd) == 0 ? ok_status()
                            : errno_error(path + ": fdatasync", errno);
}

Result<bool> LineFile::put_back() {
  const auto fs = posix_file_system();
  const Status there = fs->look_up(path_);
  if (there.ok() ? is_at(fd_, path_) : there.code() != Code::kNotFound)
    return false;
  RETURN_IF_ERROR(check_end());
  const std::string beside = temporary_path(*fs, path_);
  const Descriptor copy(
      ::open(beside.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (copy.get() < 0) return errno_error(beside + ": open", errno);
  Status placed = copy_to(copy.get(), beside);
  if (placed.ok() && there.ok())
    placed = fs->rename(path_, path_ + ".replaced");
  if (placed.ok()) placed = fs->rename(beside, path_);
  if (!placed.ok()) {
    (void)fs->remove(beside).ok();
    return placed;
  }
  // Also for the thread that syncs.
  if (dup3(copy.get(), fd_, O_CLOEXEC) < 0)
    return errno_error(path_ + ": dup3", errno);
  RETURN_IF_ERROR(fs->sync_dir(parent_path(path_)));
  return true;
}

Status LineFile::append(std::string_view text) {
  RETURN_IF_ERROR(check_end());
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = pwrite(fd_, text.data() + done, text.size() - done,
                             static_cast<off_t>(size_ + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int err = errno;
      // A partial line must not precede the next one.
      torn_ = done > 0;
      if (torn_) RETURN_IF_ERROR(check_end());
      return errno_error(path_ + ": write", err);
    }
    done += static_cast<size_t>(n);
  }
  size_ += text.size();
  return ok_status();
}

LineTail::LineTail(std::string path, bool from_end) : path_(std::move(path)) {
  struct stat st {};
  if (from_end && stat(path_.c_str(), &st) == 0)
    offset_ = static_cast<uint64_t>(st.st_size);
}

LineTail::~LineTail() {
  if (fd_ >= 0) close(fd_);
}

std::vector<std::string> LineTail::poll() {
  std::vector<std::string> lines;
  if (fd_ < 0 || !is_at(fd_, path_)) {
    const int now = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (now >= 0 && fd_ >= 0) close(fd_);
    if (now >= 0) fd_ = now;
  }
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

}  // namespace remesh::rundir
