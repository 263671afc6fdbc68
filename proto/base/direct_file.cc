#include "proto/base/direct_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "proto/base/posix_file.h"

namespace remesh {
namespace {

// Alignment of memory, offset and length; no disk requires more.
constexpr size_t kAlign = 4096;
// One buffer keeps a disk busy; kMinBuffers (32 MiB) keep it busy while the
// filling thread waits for a processor (a few hundredths of a second).
constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr uint64_t kMinBuffers = 8;
// Few pages per buffer make allocation and direct I/O cheap.
constexpr size_t kHugePage = size_t{2} << 20;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte[], Free>;

// Null if there is no memory.
Buffer make_buffer() {
  static_assert(kHugePage % kAlign == 0 && kBufferBytes % kHugePage == 0);
  void* const at = std::aligned_alloc(kHugePage, kBufferBytes);
  if (at != nullptr) (void)::madvise(at, kBufferBytes, MADV_HUGEPAGE);
  return Buffer(static_cast<std::byte*>(at));
}

}  // namespace

class BufferPool {
 public:
  // Null if there is no memory.
  Buffer take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        Buffer b = std::move(free_.back());
        free_.pop_back();
        return b;
      }
    }
    return make_buffer();
  }
  void give(Buffer b) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(b));
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

namespace {

using Clock = std::chrono::steady_clock;

class DirectFile final : public File {
 public:
  DirectFile(int fd, std::string path, const StreamOptions& options,
             std::shared_ptr<BufferPool> buffers)
      : file_(fd, std::move(path)),
        give_up_(options.give_up),
        moved_(options.moved),
        in_thread_(options.in_thread),
        idle_(options.idle),
        hurry_(options.hurry),
        max_buffers_(std::max(kMinBuffers, options.room / kBufferBytes + 2)),
        pool_(std::move(buffers)) {}
  ~DirectFile() override { drop(); }
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override {
    if (offset != begin_ + filled_ || settled_) {
      RETURN_IF_ERROR(settle());
      return failed(write_all(file_.fd(), bytes, offset));
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
      if (filled_ == kBufferBytes) queue_buffer();
    }
    return ok_status();
  }

  Status read_at(uint64_t offset, std::span<std::byte> bytes) override {
    RETURN_IF_ERROR(settle());
    return file_.read_at(offset, bytes);
  }
  Result<uint64_t> size() override {
    RETURN_IF_ERROR(settle());
    return file_.size();
  }
  Status truncate(uint64_t size) override {
    RETURN_IF_ERROR(settle());
    return file_.truncate(size);
  }
  Status sync() override {
    RETURN_IF_ERROR(settle());
    return file_.sync();
  }
  Status close() override {
    if (file_.fd() < 0) return ok_status();
    const Status settled = settle();
    const Status closed = file_.close();
    return settled.ok() ? closed : settled;
  }

 private:
  struct Job {
    Buffer buffer;
    uint64_t at = 0;
  };

  Status failed(int err) const {
    if (err == ECANCELED)
      return cancelled("write " + file_.path() + ": given up");
    return err == 0 ? ok_status() : os_error("write " + file_.path(), err);
  }
  int error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  bool given_up() const { return give_up_ != nullptr && give_up_->load(); }

  // A buffer to fill; waits for the disk while all are being written. Null
  // after a failure.
  Buffer take_free() {
    std::unique_lock lock(mutex_);
    while (error_ == 0) {
      if (num_buffers_ < max_buffers_) {
        if (Buffer b = pool_->take()) {
          ++num_buffers_;
          return b;
        }
        // Less memory than wanted is enough, as long as there is some.
        max_buffers_ = num_buffers_;
        if (num_buffers_ == 0) error_ = ENOMEM;
        continue;
      }
      changed_.wait(
          lock, [this] { return num_buffers_ < max_buffers_ || error_ != 0; });
    }
    return nullptr;
  }

  void queue_buffer() {
    if (!thread_.joinable()) {
      set_direct(true);
      thread_ = std::thread([this] { loop(); });
    }
    {
      const std::lock_guard lock(mutex_);
      if (error_ == 0 && given_up()) error_ = ECANCELED;
      jobs_.push_back({std::move(current_), begin_});
    }
    changed_.notify_all();
    begin_ += kBufferBytes;
    filled_ = 0;
  }

  void loop() {
    if (in_thread_) in_thread_();
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return quit_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      if (error_ == 0 && given_up()) error_ = ECANCELED;
      const bool skip = error_ != 0;
      lock.unlock();
      const auto begin = Clock::now();
      const int err = skip ? 0 : write_buffer(job);
      const auto took = Clock::now() - begin;
      pool_->give(std::move(job.buffer));
      lock.lock();
      if (error_ == 0) error_ = err;
      --num_buffers_;
      changed_.notify_all();
      rest(lock, took * idle_);
    }
  }

  // Sleeps until the time is over or a caller waits.
  void rest(std::unique_lock<std::mutex>& lock,
            std::chrono::duration<double> time) {
    constexpr std::chrono::milliseconds kLook{10};
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
    while (error_ == 0 && !given_up() &&
           !(hurry_ != nullptr && hurry_->load()) && Clock::now() < end)
      changed_.wait_until(lock, std::min(end, Clock::now() + kLook));
  }

  int write_buffer(const Job& job) {
    const std::span<const std::byte> bytes(job.buffer.get(), kBufferBytes);
    int err = write_all(file_.fd(), bytes, job.at);
    // The file system accepts the flag, but not the write.
    if (err == EINVAL && set_direct(false))
      err = write_all(file_.fd(), bytes, job.at);
    if (moved_) moved_();
    return err;
  }

  // Lets the thread write the queue, and joins it.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Drops what is not written yet.
  void drop() {
    {
      const std::lock_guard lock(mutex_);
      if (error_ == 0 && (filled_ > 0 || !jobs_.empty())) error_ = ECANCELED;
    }
    settled_ = true;
    stop();
    give_back();
  }

  // Passes everything so far to the kernel, in order.
  Status settle() {
    if (!settled_) {
      settled_ = true;
      stop();
      set_direct(false);
      if (error_ == 0 && given_up()) error_ = ECANCELED;
      // The tail has any length, which O_DIRECT does not accept.
      if (error_ == 0 && filled_ > 0)
        error_ = write_all(file_.fd(), {current_.get(), filled_}, begin_);
      give_back();
    }
    return failed(error_);
  }
  void give_back() {
    if (current_ != nullptr) pool_->give(std::move(current_));
    current_.reset();
  }

  bool set_direct(bool on) const {
    const int flags = ::fcntl(file_.fd(), F_GETFL);
    if (flags < 0) return false;
    return ::fcntl(file_.fd(), F_SETFL,
                   on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  }

  PosixFile file_;
  const std::atomic<bool>* const give_up_;
  const std::function<void()> moved_;
  const std::function<void()> in_thread_;
  const double idle_;
  const std::atomic<bool>* const hurry_;
  // Used by the caller's thread only.
  Buffer current_;
  uint64_t begin_ = 0;  // of current_ in the file
  size_t filled_ = 0;   // of current_
  bool settled_ = false;
  // Shared with the thread, under mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;      // in order
  uint64_t max_buffers_;      // that this file may hold
  uint64_t num_buffers_ = 0;  // held: current_ and those of jobs_
  int error_ = 0;             // errno of the first failure
  bool quit_ = false;
  const std::shared_ptr<BufferPool> pool_;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<BufferPool> make_buffer_pool() {
  return std::make_shared<BufferPool>();
}

std::unique_ptr<File> make_direct_file(int fd, std::string path,
                                       const StreamOptions& options,
                                       std::shared_ptr<BufferPool> buffers) {
  return std::make_unique<DirectFile>(fd, std::move(path), options,
                                      std::move(buffers));
}

}  // namespace remesh
