#include "coordinator/server/scanner.h"

#include <malloc.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/scan.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/rundir/events.h"

namespace remesh::server {
namespace {

constexpr std::chrono::milliseconds kRetryAfter(1000);
constexpr std::chrono::milliseconds kPatience(2000);
constexpr int64_t kProblemMs = 1000;

// A network file system reads a folder again after a change of one's own,
// instead of showing what it has cached.
void refresh_listing(FileSystem& fs, const std::string& folder) {
  const std::string path = path_join(folder, ".listing");
  if (fs.exists(folder) && fs.create(path).ok()) (void)fs.remove(path).ok();
}

}  // namespace

Result<core::CheckpointsScanned> scan_checkpoints(FileSystem& fs,
                                                  const std::string& folder,
                                                  int64_t saved_step,
                                                  uint64_t run_id) {
  refresh_listing(fs, folder);
  ASSIGN_OR_RETURN(std::vector<manifest::Found> found,
                   manifest::scan(fs, folder));
  const bool listed =
      std::ranges::count(found, saved_step, &manifest::Found::step) > 0;
  const std::string path = path_join(folder, manifest::step_name(saved_step));
  if (saved_step > 0 && !listed)
    if (auto m = manifest::read_checkpoint(fs, path); m.ok())
      found.push_back({saved_step, path, std::move(*m), ok_status()});
  core::CheckpointsScanned out;
  ASSIGN_OR_RETURN(out.claimed, manifest::claimed(fs, folder));
  for (manifest::Found& f : found) {
    if (f.status.ok())
      f.status = manifest::check_run(f.manifest, run_id).with_context(f.path);
    if (!f.status.ok()) {
      out.invalid.push_back({.step = f.step,
                             .path = std::move(f.path),
                             .code = f.status.code(),
                             .why = f.status.message()});
      continue;
    }
    core::CheckpointInfo info{.step = f.step,
                              .generation = f.manifest.generation(),
                              .path = std::move(f.path)};
    for (pb::StepMetrics& m : *f.manifest.mutable_recent())
      info.recent.push_back(std::move(m));
    out.valid.push_back(std::move(info));
  }
  return out;
}

struct Scanner::Shared {
  Shared(std::string f, uint64_t id, std::unique_ptr<FileSystem> files)
      : folder(std::move(f)),
        run_id(id),
        fs(std::move(files)),
        event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    CHECK(event_fd >= 0);
  }
  ~Shared() { close(event_fd); }
  std::optional<std::chrono::milliseconds> work();

  const std::string folder;
  const uint64_t run_id;
  const std::unique_ptr<FileSystem> fs;
  const int event_fd;
  std::mutex mutex;
  std::condition_variable idle;
  int64_t saved_step = 0;              // of the request
  std::optional<int64_t> scanning_ms;  // since when
  std::optional<core::CheckpointsScanned> result;
  std::optional<std::string> note;
  Code failed = Code::kOk;  // the scan before
  bool ended = false;
};

Scanner::Scanner(std::string folder, uint64_t run_id,
                 std::unique_ptr<FileSystem> fs)
    : shared_(
          std::make_shared<Shared>(std::move(folder), run_id, std::move(fs))),
      loop_(std::make_unique<BackgroundLoop>(
          [shared = shared_] { return shared->work(); },
          BackgroundLoop::Options{})) {}

Scanner::~Scanner() {
  std::unique_lock lock(shared_->mutex);
  shared_->ended = true;
  const bool idle = shared_->idle.wait_for(
      lock, kPatience, [this] { return !shared_->scanning_ms; });
  lock.unlock();
  if (!idle) (void)loop_.release();
}

void Scanner::request(int64_t saved_step) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->saved_step = saved_step;
  }
  loop_->wake();
}

int Scanner::fd() const { return shared_->event_fd; }

std::optional<core::CheckpointsScanned> Scanner::take() {
  uint64_t n = 0;
  (void)!read(fd(), &n, sizeof(n));  // not readable: nothing to clear
  const std::lock_guard lock(shared_->mutex);
  return std::exchange(shared_->result, std::nullopt);
}

std::optional<pb::EventRecord> Scanner::take_error() {
  const std::lock_guard lock(shared_->mutex);
  const auto cause = std::exchange(shared_->note, std::nullopt);
  if (!cause) return std::nullopt;
  pb::EventRecord e;
  e.set_event(events::kScanFailed.name);
  e.set_cause(*cause);
  return e;
}

std::optional<pb::JobStatus::Problem> Scanner::problem() const {
  const std::lock_guard lock(shared_->mutex);
  const int64_t ms =
      shared_->scanning_ms ? monotonic_ms() - *shared_->scanning_ms : 0;
  if (ms < kProblemMs) return std::nullopt;
  pb::JobStatus::Problem out;
  out.set_text(shared_->folder + ": the storage does not answer");
  out.set_seconds(static_cast<double>(ms) / 1000);
  return out;
}

std::optional<std::chrono::milliseconds> Scanner::Shared::work() {
  std::unique_lock lock(mutex);
  if (ended) return std::nullopt;
  const int64_t step = saved_step;
  scanning_ms = monotonic_ms();
  lock.unlock();
  Result<core::CheckpointsScanned> scanned =
      scan_checkpoints(*fs, folder, step, run_id);
  lock.lock();
  scanning_ms.reset();
  idle.notify_all();
  const bool ok = scanned.ok();
  const Code code = scanned.status().code();
  if (ok)
    result = std::move(*scanned);
  else if (code != failed)
    note = scanned.status().message();
  failed = code;
  lock.unlock();
  const uint64_t one = 1;
  CHECK(write(event_fd, &one, sizeof(one)) == sizeof(one));
  // glibc keeps what a thread has freed for that thread, such as the manifests
  // of a scan, or the messages that arrived while this process was stopped.
  (void)malloc_trim(0);
  if (ok) return std::nullopt;
  return kRetryAfter;
}

}  // namespace remesh::server
