#include "coordinator/server/outbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
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
  bool line = false;  // may be passed by what is no line
  bool keep = false;  // actions wait for the line even while lines fail
  uint64_t number = 0;
  bool begun = false;
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
  std::optional<size_t> first_but_lines() const;
  Status attempt(size_t i, std::unique_lock<std::mutex>* lock);
  void note_result(size_t i, const Status& status);
  bool lines_fail() const;
  void release_lines();
  void notify_owner() const;
  Job* replaced_by(const Job& next);

  const Options options;
  const int event_fd;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  std::set<uint64_t> gates;  // numbers of those for which actions wait
  size_t bytes = 0;          // of the jobs
  Status failure;            // of the first job
  Wait first;                // the first job
  Wait unwritten;            // some of the gates
  Wait stalled;              // the call in progress
  bool stop = false;
  bool ended = false;
};

void Outbox::Shared::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return stop || !jobs.empty(); });
    if (stop) break;
    Status status = attempt(0, &lock);
    const bool line_failed =
        !status.ok() && status.code() != Code::kCancelled && jobs.front().line;
    bool others_failed = false;
    while (line_failed && !others_failed && !stop) {
      const auto next = first_but_lines();
      if (!next) break;
      status = attempt(*next, &lock);
      others_failed = !status.ok();
    }
    if (status.code() == Code::kCancelled) break;
    if (line_failed || !status.ok())
      changed.wait_for(lock, std::chrono::milliseconds(options.retry_ms), [&] {
        return stop || (line_failed && !others_failed && first_but_lines());
      });
  }
  jobs.clear();
  ended = true;
  changed.notify_all();
}

std::optional<size_t> Outbox::Shared::first_but_lines() const {
  const auto it = std::ranges::find(jobs, false, &Job::line);
  if (it == jobs.end()) return std::nullopt;
  return static_cast<size_t>(it - jobs.begin());
}

// Only this thread removes jobs.
Status Outbox::Shared::attempt(size_t i, std::unique_lock<std::mutex>* lock) {
  jobs[i].begun = true;
  const Write& write = jobs[i].write;  // stays where it is
  stalled.begin(monotonic_ms());
  lock->unlock();
  Status status = write();
  lock->lock();
  note_result(i, status);
  return status;
}

void Outbox::Shared::note_result(size_t i, const Status& status) {
  const int64_t now = monotonic_ms();
  stalled.end(now);
  if (i == 0 || status.code() == Code::kCancelled) {
    if (failure.ok() != status.ok() && options.note) options.note(status);
    failure = status;
  }
  if (!status.ok() && status.code() != Code::kCancelled) {
    if (lines_fail()) release_lines();
    return;
  }
  if (status.ok()) {
    const bool gate = gates.erase(jobs[i].number) > 0;
    bytes -= jobs[i].bytes;
    jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(i));
    if (i == 0) first.restart(now, !jobs.empty());
    if (gate) unwritten.restart(now, !gates.empty());
    changed.notify_all();
  }
  notify_owner();
}

bool Outbox::Shared::lines_fail() const {
  return !jobs.empty() && jobs.front().line && !failure.ok();
}

// Actions wait for lines that fail no longer, except for those to be kept.
void Outbox::Shared::release_lines() {
  const size_t before = gates.size();
  for (const Job& job : jobs) {
    if (job.line && !job.keep) gates.erase(job.number);
  }
  if (gates.size() == before) return;
  unwritten.restart(monotonic_ms(), !gates.empty());
  notify_owner();
}

void Outbox::Shared::notify_owner() const {
  const uint64_t one = 1;
  CHECK(::write(event_fd, &one, sizeof(one)) == sizeof(one));
}

// The state that a later one takes the place of; null if there is none.
Outbox::Job* Outbox::Shared::replaced_by(const Job& next) {
  if (next.state == 0) return nullptr;
  const auto last = std::find_if_not(jobs.rbegin(), jobs.rend(),
                                     [](const Job& j) { return j.line; });
  return last != jobs.rend() && !last->begun && last->file == next.file &&
                 last->state == next.state
             ? &*last
             : nullptr;
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
    add({std::move(file), std::move(write), bytes, /*state=*/0, /*line=*/true,
         keep});
}

int64_t Outbox::take_dropped() {
  const std::lock_guard lock(shared_->mutex);
  return shared_->jobs.empty() ? std::exchange(dropped_, 0) : 0;
}

void Outbox::add(Job job) {
  job.number = ++newest_;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->ended) return;
  auto& jobs = shared_->jobs;
  shared_->bytes += job.bytes;
  if (Job* before = shared_->replaced_by(job); before != nullptr) {
    shared_->bytes -= before->bytes;
    before->write = std::move(job.write);
    before->bytes = job.bytes;
    return;
  }
  if (jobs.empty()) shared_->first.begin(monotonic_ms());
  if (!job.line || job.keep || !shared_->lines_fail()) {
    if (shared_->gates.empty()) shared_->unwritten.begin(monotonic_ms());
    shared_->gates.insert(job.number);
  }
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
  return shared_->gates.empty() || *shared_->gates.begin() > number;
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
  const int64_t ms = shared_->first.lasts_ms(now);
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
