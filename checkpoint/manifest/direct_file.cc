#include "checkpoint/manifest/direct_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace remesh::manifest {
namespace {

// Of memory, place and length; no disk asks for more.
constexpr size_t kAlign = 4096;
// Large enough that a disk is busy with one, so many that it stays busy while
// the filling thread has to wait for a processor (32 MiB, a few hundredths of
// s).
constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr int kNumBuffers = 8;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte[], Free>;

// Null: no memory.
Buffer make_buffer() {
  return Buffer(
      static_cast<std::byte*>(std::aligned_alloc(kAlign, kBufferBytes)));
}

// Writes all bytes, or says why not.
int write_all(int fd, const std::byte* data, size_t n, uint64_t at) {
  while (n > 0) {
    const ssize_t done = ::pwrite(fd, data, n, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return EIO;  // POSIX allows it for no file we write
    data += done;
    at += static_cast<uint64_t>(done);
    n -= static_cast<size_t>(done);
  }
  return 0;
}

class DirectFile final : public File {
 public:
  DirectFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  ~DirectFile() override {
    stop();
    if (fd_ >= 0) ::close(fd_);
  }
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override {
    if (offset != begin_ + filled_ || settled_) {
      RETURN_IF_ERROR(settle());
      return failed(write_all(fd_, bytes.data(), bytes.size(), offset));
    }
    while (!bytes.empty()) {
      if (current_ == nullptr) {
        current_ = take_free();
        if (current_ == nullptr) return failed(error());
      }
      const size_t n = std::min(bytes.size(), kBufferBytes - filled_);
      std::memcpy(current_.get() + filled_, bytes.data(), n);
      filled_ += n;
      bytes = bytes.subspan(n);
      if (filled_ == kBufferBytes) hand_over();
    }
    return ok_status();
  }

  Status read_at(uint64_t offset, std::span<std::byte> bytes) override {
    RETURN_IF_ERROR(settle());
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

  Result<uint64_t> size() override {
    RETURN_IF_ERROR(settle());
    struct stat st = {};
    if (::fstat(fd_, &st) != 0) return os_error("stat " + path_, errno);
    return static_cast<uint64_t>(st.st_size);
  }

  Status truncate(uint64_t size) override {
    RETURN_IF_ERROR(settle());
    while (::ftruncate(fd_, static_cast<off_t>(size)) != 0)
      if (errno != EINTR) return os_error("truncate " + path_, errno);
    return ok_status();
  }

  Status sync() override {
    RETURN_IF_ERROR(settle());
    while (::fsync(fd_) != 0)
      if (errno != EINTR) return os_error("fsync " + path_, errno);
    return ok_status();
  }

  Status close() override {
    if (fd_ < 0) return ok_status();
    const Status settled = settle();
    const int fd = fd_;
    fd_ = -1;
    // EINTR: Linux has closed it all the same.
    if (::close(fd) != 0 && errno != EINTR && settled.ok())
      return os_error("close " + path_, errno);
    return settled;
  }

 private:
  struct Job {
    Buffer buffer;
    uint64_t at = 0;
  };

  Status failed(int err) const {
    return err == 0 ? ok_status() : os_error("write " + path_, err);
  }
  int error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // A buffer to fill, waiting for the disk when all are under way; null after a
  // failure.
  Buffer take_free() {
    std::unique_lock lock(mutex_);
    if (num_buffers_ < kNumBuffers && free_.empty() && error_ == 0) {
      Buffer b = make_buffer();
      if (b == nullptr) error_ = ENOMEM;
      num_buffers_ += b == nullptr ? 0 : 1;
      return b;
    }
    changed_.wait(lock, [this] { return !free_.empty() || error_ != 0; });
    if (error_ != 0) return nullptr;
    Buffer b = std::move(free_.back());
    free_.pop_back();
    return b;
  }

  void hand_over() {
    if (!thread_.joinable()) {
      set_direct(true);
      thread_ = std::thread([this] { loop(); });
    }
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back({std::move(current_), begin_});
    }
    changed_.notify_all();
    begin_ += kBufferBytes;
    filled_ = 0;
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return quit_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.erase(jobs_.begin());
      const bool skip = error_ != 0;
      lock.unlock();
      int err = 0;
      if (!skip) err = write_all(fd_, job.buffer.get(), kBufferBytes, job.at);
      // The file system took the flag, but not the write.
      if (err == EINVAL && set_direct(false))
        err = write_all(fd_, job.buffer.get(), kBufferBytes, job.at);
      lock.lock();
      if (error_ == 0) error_ = err;
      free_.push_back(std::move(job.buffer));
      changed_.notify_all();
    }
  }

  // Lets the thread write what it has, and end.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Everything so far is in the kernel's hands, in order.
  Status settle() {
    if (!settled_) {
      settled_ = true;
      stop();
      set_direct(false);
      // The end has any length, which O_DIRECT does not take.
      if (error_ == 0 && filled_ > 0)
        error_ = write_all(fd_, current_.get(), filled_, begin_);
      current_.reset();
    }
    return failed(error_);
  }

  bool set_direct(bool on) const {
    const int flags = ::fcntl(fd_, F_GETFL);
    if (flags < 0) return false;
    return ::fcntl(fd_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) ==
           0;
  }

  int fd_;
  const std::string path_;
  // The caller's side.
  Buffer current_;
  uint64_t begin_ = 0;  // of current_ in the file
  size_t filled_ = 0;   // of current_
  bool settled_ = false;
  // Shared with the thread.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job> jobs_;     // in order
  std::vector<Buffer> free_;  // to be filled again
  int num_buffers_ = 0;       // made
  int error_ = 0;             // errno of the first failure
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<File> make_direct_file(int fd, std::string path) {
  return std::make_unique<DirectFile>(fd, std::move(path));
}

}  // namespace remesh::manifest
