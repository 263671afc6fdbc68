#include "coordinator/server/outbox.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "coordinator/server/wait.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

namespace remesh::server {
namespace {

// A failing write is tried again many times in this time; one that takes longer
// than usual may be a disk that others use (Options::stalled_ms).
constexpr int64_t kFailingMs = 1000;

}  // namespace

// ------------------------------------------------------------------ thread

struct Outbox::Job {
  std::string file;
  Write write;
  size_t bytes = 0;
  uint64_t state = 0;
  bool line = false;    // nothing depends on it
  uint64_t writes = 1;  // with those before it that are made in other jobs
};

struct Outbox::Shared {
  explicit Shared(Options o)
      : options(std::move(o)),
        event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    CHECK(event_fd >= 0);
  }
  ~Shared() { close(event_fd); }

  void run();
  // With the lock.
  void note_result(const Status& status);
  Job* replaced_by(const Job& next);

  const Options options;
  const int event_fd;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  size_t bytes = 0;  // of the jobs
  uint64_t done = 0;
  Status failure;  // of the first job
  Wait unwritten;  // the first job
  Wait stalled;    // the call in progress
  bool stop = false;
  bool ended = false;
};

void Outbox::Shared::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return stop || !jobs.empty(); });
    if (stop) break;
    const Write& write = jobs.front().write;  // stays where it is
    stalled.begin(monotonic_ms());
    lock.unlock();
    const Status status = write();
    lock.lock();
    note_result(status);
    if (status.code() == Code::kCancelled) break;
    if (!status.ok())
      changed.wait_for(lock, std::chrono::milliseconds(options.retry_ms),
                       [this] { return stop; });
  }
  jobs.clear();
  ended = true;
  changed.notify_all();
}

void Outbox::Shared::note_result(const Status& status) {
  const int64_t now = monotonic_ms();
  stalled.end(now);
  if (failure.ok() != status.ok() && options.note) options.note(status);
  failure = status;
  if (!status.ok() && status.code() != Code::kCancelled) return;
  if (status.ok()) {
    bytes -= jobs.front().bytes;
    done += jobs.front().writes;
    jobs.pop_front();
    unwritten.end(now);
    if (!jobs.empty()) unwritten.begin(now);
    changed.notify_all();
  }
  const uint64_t one = 1;
  CHECK(::write(event_fd, &one, sizeof(one)) == sizeof(one));
}

// The state that a later one takes the place of; null if there is none. The
// first job may have begun.
Outbox::Job* Outbox::Shared::replaced_by(const Job& next) {
  if (next.state == 0) return nullptr;
  for (size_t i = jobs.size(); i-- > 1;) {
    Job& job = jobs[i];
    if (job.line) continue;
    return job.file == next.file && job.state == next.state ? &job : nullptr;
  }
  return nullptr;
}

// ------------------------------------------------------------------- owner

Outbox::Outbox(Options options)
    : shared_(std::make_shared<Shared>(std::move(options))) {
  std::thread([shared = shared_] { shared->run(); }).detach();
}

Outbox::~Outbox() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(
      lock, std::chrono::milliseconds(shared_->options.patience_ms),
      [this] { return shared_->ended; });
}

void Outbox::write(std::string file, Write write, size_t bytes,
                   uint64_t state) {
  add({std::move(file), std::move(write), bytes, state});
}

void Outbox::write_line(std::string file, Write write, size_t bytes,
                        bool keep) {
  if (full() && !keep)
    ++dropped_;
  else
    add({std::move(file), std::move(write), bytes, /*state=*/0, /*line=*/true});
}

int64_t Outbox::take_dropped() {
  return written(newest_) ? std::exchange(dropped_, 0) : 0;
}

void Outbox::add(Job job) {
  ++newest_;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->ended) return;
  auto& jobs = shared_->jobs;
  shared_->bytes += job.bytes;
  if (Job* before = shared_->replaced_by(job); before != nullptr) {
    shared_->bytes -= before->bytes;
    before->write = std::move(job.write);
    before->bytes = job.bytes;
    ++jobs.back().writes;  // it is done when all before it are
    return;
  }
  if (jobs.empty()) shared_->unwritten.begin(monotonic_ms());
  jobs.push_back(std::move(job));
  shared_->changed.notify_all();
}

bool Outbox::full() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->bytes >= shared_->options.full_bytes;
}

void Outbox::then(std::function<void()> act) {
  if (waiting_.empty() && written(newest_)) return act();
  waiting_.push_back({newest_, std::move(act)});
}

bool Outbox::written(uint64_t number) const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->done >= number;
}

int Outbox::fd() const { return shared_->event_fd; }

void Outbox::deliver() {
  uint64_t n = 0;
  (void)!read(fd(), &n, sizeof(n));  // not readable: nothing to clear
  while (!waiting_.empty() && written(waiting_.front().after)) {
    const auto act = std::move(waiting_.front().act);
    waiting_.pop_front();
    act();
  }
}

Outbox::Waited Outbox::take_waited() {
  const int64_t now = monotonic_ms();
  const std::lock_guard lock(shared_->mutex);
  return {.unwritten_ms = shared_->unwritten.take_ms(now),
          .stalled_ms = shared_->stalled.take_ms(now)};
}

std::optional<Status> Outbox::refused() const {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->failure.code() != Code::kCancelled) return std::nullopt;
  return shared_->failure;
}

std::optional<pb::JobStatus::Problem> Outbox::problem() const {
  const int64_t now = monotonic_ms();
  const std::lock_guard lock(shared_->mutex);
  const int64_t ms = shared_->unwritten.lasts_ms(now);
  if (ms < (shared_->failure.ok() ? shared_->options.stalled_ms : kFailingMs))
    return std::nullopt;
  pb::JobStatus::Problem out;
  out.set_text(shared_->failure.ok() ? shared_->jobs.front().file +
                                           ": the storage does not answer"
                                     : shared_->failure.message());
  out.set_seconds(static_cast<double>(ms) / 1000);
  return out;
}

void Outbox::finish(int64_t patience_ms) {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait_for(lock, std::chrono::milliseconds(patience_ms),
                            [this] { return shared_->jobs.empty(); });
}

}  // namespace remesh::server
