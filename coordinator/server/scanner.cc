#include "coordinator/server/scanner.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/scan.h"
#include "proto/base/check.h"

namespace remesh::server {
namespace {

constexpr std::chrono::milliseconds kRetryAfter(1000);

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
  const bool listed = std::any_of(found.begin(), found.end(), [&](auto& f) {
    return f.step == saved_step;
  });
  const std::string path = path_join(folder, manifest::step_name(saved_step));
  if (saved_step > 0 && !listed)
    if (auto m = manifest::read_checkpoint(fs, path); m.ok())
      found.push_back({saved_step, path, std::move(*m), ok_status()});
  core::CheckpointsScanned out;
  ASSIGN_OR_RETURN(out.claimed, manifest::claimed(fs, folder));
  for (manifest::Found& f : found) {
    if (f.status.ok()) f.status = manifest::check_run(f.manifest, run_id);
    if (!f.status.ok()) {
      out.invalid.push_back(f.path + ": " + f.status.message());
      out.invalid_steps.push_back(f.step);
      continue;
    }
    core::CheckpointInfo info{.step = f.step,
                              .generation = f.manifest.generation(),
                              .path = std::move(f.path)};
    for (pb::StepMetrics& m : *f.manifest.mutable_recent()) {
      info.recent.push_back(std::move(m));
    }
    out.valid.push_back(std::move(info));
  }
  return out;
}

Scanner::Scanner(std::string folder, uint64_t run_id)
    : folder_(std::move(folder)),
      run_id_(run_id),
      fs_(posix_file_system()),
      event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK(event_fd_ >= 0);
  loop_.emplace([this] { return work(); }, BackgroundLoop::Options{});
}

Scanner::~Scanner() {
  loop_.reset();
  close(event_fd_);
}

void Scanner::request(int64_t saved_step) {
  {
    const std::lock_guard lock(mutex_);
    saved_step_ = saved_step;
  }
  loop_->wake();
}

std::optional<core::CheckpointsScanned> Scanner::take() {
  uint64_t n = 0;
  (void)!read(event_fd_, &n, sizeof(n));  // not readable: nothing to clear
  const std::lock_guard lock(mutex_);
  return std::exchange(result_, std::nullopt);
}

std::optional<std::string> Scanner::take_note() {
  const std::lock_guard lock(mutex_);
  return std::exchange(note_, std::nullopt);
}

void Scanner::wake_owner() {
  const uint64_t one = 1;
  CHECK(write(event_fd_, &one, sizeof(one)) == sizeof(one));
}

std::optional<std::chrono::milliseconds> Scanner::work() {
  int64_t saved_step = 0;
  {
    const std::lock_guard lock(mutex_);
    saved_step = saved_step_;
  }
  Result<core::CheckpointsScanned> scanned =
      scan_checkpoints(*fs_, folder_, saved_step, run_id_);
  const bool ok = scanned.ok();
  {
    const std::lock_guard lock(mutex_);
    if (ok) {
      result_ = std::move(*scanned);
      last_note_.clear();
    } else if (scanned.status().message() != last_note_) {
      note_ = last_note_ = scanned.status().message();
    }
  }
  wake_owner();
  if (ok) return std::nullopt;
  return kRetryAfter;
}

}  // namespace remesh::server
