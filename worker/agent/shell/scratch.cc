#include "worker/agent/shell/scratch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "proto/base/clock.h"
#include "proto/base/descriptor.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/base/process.h"
#include "proto/base/rng.h"
#include "proto/limits/plausible.h"
#include "worker/agent/shell/state_folder.h"

namespace remesh::agent {
namespace fs = std::filesystem;
using memory::may_live;
using memory::owner_file;
using memory::owner_of;
namespace {

constexpr int kDeathTimeoutMs = 5000;
constexpr int kTries = 100;
// How long a clean-up by another worker may hold the lock of a dead one.
constexpr int64_t kSweepTimeoutMs = 6000;

// Creates a folder that only this user can access. In /tmp another user may
// have created one of that name. A folder that was there may be readable by
// others, as the root often is, but nobody else may replace what is in it.
Status make_private_folder(const std::string& path) {
  struct stat st {};
  // An ending worker may remove an empty folder between the calls.
  for (int tries = 0;; ++tries) {
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
      return errno_error("make folder " + path, errno);
    if (lstat(path.c_str(), &st) == 0) break;
    if (errno != ENOENT || tries == kTries) return errno_error(path, errno);
  }
  if (!S_ISDIR(st.st_mode))
    return invalid_argument(path + ": not a folder; choose another --scratch");
  if (st.st_uid != geteuid())
    return invalid_argument(fmt::format(
        "{}: belongs to user {}, not to {}; choose another --scratch", path,
        st.st_uid, geteuid()));
  if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0)
    return invalid_argument(fmt::format(
        "{}: others may write to it; chmod go-w it or choose another --scratch",
        path));
  return ok_status();
}

// The locked descriptor, or -1 with errno EWOULDBLOCK if another process holds
// the lock. A file removed between open and flock does not count.
int try_lock(const std::string& path) {
  while (true) {
    const int fd =
        open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int err = errno;
      close(fd);
      errno = err;
      return -1;
    }
    if (is_at(fd, path)) return fd;
    close(fd);
  }
}

struct Holder {
  pid_t pid = 0;  // 0: of no living process
  uint64_t incarnation = 0;
};

// What the lock file says.
Holder holder_of(const std::string& path) {
  std::ifstream in(path);
  Holder out;
  in >> out.pid >> out.incarnation;
  if (out.pid <= 0 || (kill(out.pid, 0) != 0 && errno != EPERM)) out.pid = 0;
  return out;
}

// Removes all shared memory of the worker but committed states.
uint64_t clean_shared(const std::string& folder, const std::string& shared) {
  const std::string root = shared_root_of(folder, shared);
  if (!memory::is_private_folder(root)) return 0;
  const std::string states = state_folder_of(folder, shared);
  for (const uint64_t job : memory::list_jobs(states))
    memory::remove_unfinished(states, job);
  const bool keep = has_states(states);
  std::error_code ignored;
  uint64_t files = 0;
  for (const fs::path& path : entries_of(root)) {
    if (keep && (path == states || path == owner_file(root))) continue;
    const uint64_t n = fs::remove_all(path, ignored);
    if (!ignored) files += n;
  }
  rmdir(root.c_str());  // succeeds if nothing is kept
  return files;
}

// Kills the ranks and removes the files that a worker left, but not its states.
// Returns a description for the log, or "". REQUIRES: the lock in `folder` is
// held.
std::string clean(const std::string& folder, const std::string& shared) {
  std::vector<ProcessId> ranks;
  std::ifstream in(folder + "/ranks");
  ProcessId id;
  while (in >> id.pid >> id.start_time) ranks.push_back(id);
  const int killed = kill_leftovers(ranks, kDeathTimeoutMs);
  std::error_code ignored;
  uint64_t files = clean_shared(folder, shared);
  for (const fs::path& path : entries_of(folder)) {
    if (path.filename() == "lock") continue;
    const uint64_t n = fs::remove_all(path, ignored);
    if (!ignored) files += n;
  }
  if (killed == 0 && files == 0) return "";
  return fmt::format("{}: {} ranks killed, {} files removed", folder, killed,
                     files);
}

// Removes the folder itself, unless it is needed to find states. REQUIRES: the
// lock is held. A process that waits for the lock notices that the file is
// gone.
void remove_cleaned(const std::string& folder, const std::string& shared) {
  if (has_states(state_folder_of(folder, shared))) return;
  unlink((folder + "/lock").c_str());
  rmdir(folder.c_str());
}

// Whether a worker of this user made the folder: other programs have files of
// that name as well, and `root` may be a folder that others write to.
bool is_of_worker(const std::string& folder) {
  if (!memory::is_private_folder(folder)) return false;
  std::ifstream in(folder + "/lock");
  int64_t pid = 0;
  uint64_t incarnation = 0;
  std::string more;
  return in >> pid >> incarnation && pid > 0 && !(in >> more);
}

// Calls f(folder), with the lock held, for each dead worker under `root` but
// `own` for which wanted(folder) is true. Locks only those, since a new worker
// of the name would have to wait.
template <typename W, typename F>
void for_each_dead(const std::string& root, const std::string& own,
                   const W& wanted, const F& f) {
  for (const fs::path& path : entries_of(root)) {
    const std::string folder = path.string();
    if (folder == own || !is_of_worker(folder) || !wanted(folder)) continue;
    const Descriptor lock(try_lock(folder + "/lock"));
    if (lock.get() >= 0) f(folder);
  }
}

// Cleans up after a killed worker. Returns the number of segments removed.
// REQUIRES: its lock is held.
int sweep_one(const std::string& folder, const std::string& shared) {
  const int removed =
      agent::refresh_states(state_folder_of(folder, shared), /*job=*/0);
  (void)clean(folder, shared);
  remove_cleaned(folder, shared);
  return removed;
}

// Removes a folder of states that has become empty, and what is beside it.
void remove_empty(const std::string& state_folder) {
  if (has_states(state_folder)) return;
  const std::string root = fs::path(state_folder).parent_path();
  rmdir(state_folder.c_str());
  // A living worker has other folders there.
  for (const fs::path& path : entries_of(root))
    if (path != owner_file(root)) return;
  unlink(owner_file(root).c_str());
  rmdir(root.c_str());
}

// Removes the old states of all workers of this user, under any root; those of
// dead workers sooner. `own` is alive. Returns the number of segments removed.
int remove_unclaimed(const std::string& own, const std::string& shared) {
  int removed = 0;
  for (const std::string& folder : memory::state_folders(shared)) {
    const std::string owner = owner_of(folder);
    const bool dead = owner != own && !may_live(owner);
    const int here = remove_unclaimed_states(
        folder, dead ? kStateKeptS : memory::kStateUnclaimedS);
    removed += here;
    if (here > 0) remove_empty(folder);
  }
  return removed;
}

void sweep(const std::string& root, const std::string& own,
           const std::string& shared) {
  for_each_dead(
      root, own, [](const std::string&) { return true; },
      [&](const std::string& folder) { (void)sweep_one(folder, shared); });
  (void)remove_unclaimed(own, shared);
}

}  // namespace

// In /dev/shm, since the kernel would write shared memory on a disk to it.
std::string shared_root_of(const std::string& folder,
                           const std::string& shared) {
  return fmt::format("{}/{}{:016x}", shared, memory::shared_folder_prefix(),
                     hash64(folder));
}

std::string state_folder_of(const std::string& folder,
                            const std::string& shared) {
  return shared_root_of(folder, shared) + "/state";
}

Result<std::unique_ptr<Scratch>> Scratch::open(const std::string& root,
                                               const std::string& name,
                                               int64_t patience_ms,
                                               const std::string& shared) {
  if (shared != kSharedMemory && !is_folder(shared))
    return invalid_argument("--state-folder " + shared + ": no such folder");
  const std::string absolute_root = absolute_path(root);
  std::unique_ptr<Scratch> out(new Scratch);
  out->name_ = name;
  out->root_ = absolute_root;
  out->folder_ = absolute_root + "/" + name;
  out->shared_ = absolute_path(shared);
  out->shared_root_ = shared_root_of(out->folder_, out->shared_);
  RETURN_IF_ERROR(out->take_lock(patience_ms));
  out->incarnation_ = holder_of(out->folder_ + "/lock").incarnation;
  RETURN_IF_ERROR(out->write_lock());
  out->cleaned_ = clean(out->folder_, out->shared_);
  sweep(absolute_root, out->folder_, out->shared_);
  RETURN_IF_ERROR(make_private_folder(out->pmix_folder()));
  return out;
}

bool Scratch::has_states_of(const std::string& root, const std::string& name,
                            const std::string& shared) {
  return has_states(
      state_folder_of(absolute_path(root) + "/" + name, absolute_path(shared)));
}

Status Scratch::take_lock(int64_t patience_ms) {
  const std::string lock = folder_ + "/lock";
  const int64_t begin = monotonic_ms();
  // An ending worker may remove the folders between the calls.
  for (int tries = 0;; ++tries) {
    RETURN_IF_ERROR(make_private_folder(root_));
    if (mkdir(folder_.c_str(), 0700) == 0 || errno == EEXIST)
      lock_fd_ = try_lock(lock);
    if (lock_fd_ >= 0) {
      Status status = make_private_folder(folder_);
      // Nothing in a folder of others is acted on.
      if (!status.ok()) close(std::exchange(lock_fd_, -1));
      return status;
    }
    if (errno == ENOENT && tries < kTries) continue;
    if (errno != EWOULDBLOCK) return errno_error(lock, errno);
    const pid_t holder = holder_of(lock).pid;
    const int64_t patience = holder == 0 ? kSweepTimeoutMs : patience_ms;
    if (monotonic_ms() < begin + patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    return already_exists(
        fmt::format("worker '{}' is already running on this host (pid {} holds "
                    "{}); choose another --name",
                    name_, holder, lock));
  }
}

// In place: that succeeds on a full disk, too, if the file has its block.
Status Scratch::write_lock() {
  const std::string text = fmt::format("{} {}\n", getpid(), incarnation_);
  const auto size = static_cast<ssize_t>(text.size());
  if (pwrite(lock_fd_, text.data(), text.size(), 0) != size ||
      ftruncate(lock_fd_, size) != 0)
    return errno_error(folder_ + "/lock: write", errno);
  return ok_status();
}

uint64_t Scratch::new_incarnation(uint64_t by_clock) {
  constexpr uint64_t kDay = uint64_t{86'400'000} << limits::kIncarnationBits;
  if (incarnation_ > by_clock + kDay) incarnation_ = 0;
  incarnation_ = std::max(incarnation_ + 1, by_clock);
  (void)write_lock().ok();  // the one before is in it
  return incarnation_;
}

Scratch::~Scratch() {
  if (lock_fd_ < 0) return;
  (void)clean(folder_, shared_);
  remove_cleaned(folder_, shared_);
  close(lock_fd_);
  // This may be the last worker that can clean up after a killed one.
  sweep(root_, folder_, shared_);
  rmdir(root_.c_str());  // succeeds if it is empty
}

// The lock goes with its file, so another worker may have the name now.
Status Scratch::put_back() {
  if (is_at(lock_fd_, folder_ + "/lock")) return ok_status();
  if (lock_fd_ >= 0) close(std::exchange(lock_fd_, -1));
  RETURN_IF_ERROR(take_lock(/*patience_ms=*/0));
  RETURN_IF_ERROR(write_lock());
  return make_private_folder(pmix_folder());
}

Result<Scratch::Generation> Scratch::make_generation(int64_t generation,
                                                     uint64_t shared_bytes) {
  RETURN_IF_ERROR(put_back());
  Generation out;
  out.folder = fmt::format("{}/g{}", folder_, generation);
  RETURN_IF_ERROR(make_private_folder(out.folder));
  const bool fits = memory::check_room(shared_root_, shared_bytes).ok();
  const std::string shared = fmt::format("{}/g{}", shared_root_, generation);
  if (fits && make_private_folder(shared_root_).ok() &&
      make_private_folder(shared).ok()) {
    out.shared = shared;
  } else {
    out.shared = out.folder + "/shm";
    RETURN_IF_ERROR(make_private_folder(out.shared));
  }
  return out;
}

void Scratch::remove_generation(int64_t generation) {
  std::error_code ignored;
  fs::remove_all(fmt::format("{}/g{}", folder_, generation), ignored);
  fs::remove_all(fmt::format("{}/g{}", shared_root_, generation), ignored);
  remove_empty(state_folder());
  unlink((folder_ + "/ranks").c_str());
}

void Scratch::note_rank(pid_t pid) {
  const auto stat = read_proc_stat(pid);
  if (!stat) return;
  std::ofstream(folder_ + "/ranks", std::ios::app)
      << pid << " " << stat->start_time << "\n";
}

std::string Scratch::state_folder() const {
  return state_folder_of(folder_, shared_);
}

Status Scratch::make_state_folder() {
  RETURN_IF_ERROR(make_private_folder(shared_root_));
  std::ofstream(owner_file(shared_root_)) << folder_ << "\n";
  return make_private_folder(state_folder());
}

std::optional<uint64_t> Scratch::state_room(uint64_t job) const {
  struct statvfs room {};
  // A file system without blocks has no limit.
  if (statvfs(shared_.c_str(), &room) != 0 || room.f_blocks == 0)
    return std::nullopt;
  uint64_t out = room.f_bavail * room.f_frsize;
  // What they take: parts of a segment may have no memory.
  struct stat file {};
  for (const auto& f : memory::list_segments(state_folder(), job))
    if (stat(f.path.c_str(), &file) == 0)
      out += std::min<uint64_t>(f.bytes, 512 * file.st_blocks);
  return out;
}

int Scratch::refresh_states(uint64_t job) {
  // What cleans temporary folders by age leaves these alone.
  (void)futimens(lock_fd_, nullptr);
  (void)utimensat(AT_FDCWD, (folder_ + "/ranks").c_str(), nullptr, 0);
  int removed = job == 0 ? 0 : agent::refresh_states(state_folder(), job);
  for_each_dead(
      root_, folder_,
      [&](const std::string& f) {
        return has_old_states(state_folder_of(f, shared_));
      },
      [&](const std::string& f) { removed += sweep_one(f, shared_); });
  return removed + remove_unclaimed(folder_, shared_);
}

int Scratch::remove_states(uint64_t job, bool of_dead_workers) {
  if (job == 0) return 0;
  int removed = memory::remove_segments(state_folder(), job);
  if (of_dead_workers)
    for_each_dead(
        root_, folder_,
        [&](const std::string& f) {
          return has_states(state_folder_of(f, shared_));
        },
        [&](const std::string& f) {
          removed += memory::remove_segments(state_folder_of(f, shared_), job);
        });
  return removed;
}

std::vector<Leftover> clean_host(bool all, bool dry_run,
                                 const std::string& shared) {
  std::vector<Leftover> out;
  for (const std::string& folder : memory::state_folders(shared)) {
    Leftover l{.folder = folder, .owner = owner_of(folder)};
    l.alive = !l.owner.empty() && may_live(l.owner);
    l.age_s = age_of_states(folder);
    for (const uint64_t job : memory::list_jobs(folder))
      for (const auto& f : memory::list_segments(folder, job)) {
        l.bytes += f.bytes;
        const auto s = memory::StateSegment::open(
            f.path, job, memory::StateSegment::Mode::kRead);
        if (!s.ok()) continue;
        for (const auto& c : (*s)->contents().states)
          l.step = std::max(l.step, c.info.step);
      }
    if (l.bytes == 0) continue;
    if (!dry_run && !l.alive) {
      (void)remove_unclaimed_states(folder, all ? -1 : kStateKeptS);
      l.removed = !has_states(folder);
      remove_empty(folder);
    }
    out.push_back(std::move(l));
  }
  return out;
}

std::string default_scratch_root() {
  return fmt::format("/tmp/remesh-{}", geteuid());
}

}  // namespace remesh::agent
