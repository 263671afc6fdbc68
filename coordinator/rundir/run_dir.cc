#include "coordinator/rundir/run_dir.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <random>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/known_runs.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/clock.h"
#include "proto/base/descriptor.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/base/keyed_hash.h"
#include "proto/base/process.h"
#include "proto/base/rng.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"
#include "proto/rundir/events.h"
#include "proto/rundir/file_tail.h"

namespace remesh::rundir {
namespace {

namespace fs = std::filesystem;

// The holder of a lock file: "PID HOST TIME".
struct Holder {
  int pid = 0;
  std::string host;
  std::string text;  // all of it

  std::string to_text() const {
    return fmt::format("pid {} on {}",
                       pid > 0 ? std::to_string(pid) : "unknown",
                       host.empty() ? "an unknown host" : host);
  }
};

Holder read_holder(int fd) {
  char text[300] = {};
  if (pread(fd, text, sizeof(text) - 1, 0) <= 0) return {};
  Holder out{.text = text};
  std::istringstream(text) >> out.pid >> out.host;
  return out;
}

// When the newest coordinator of a run started, in unix seconds, by its events,
// or when it was made by `remesh fork`; 0 if neither ever happened.
double started_at(const std::string& run) {
  const std::vector<std::string> lines = read_lines(events_path(run));
  for (auto line = lines.rbegin(); line != lines.rend(); ++line)
    for (const auto* start :
         {&events::kCoordinatorStarted, &events::kCoordinatorRestarted,
          &events::kForked}) {
      if (line->find(start->name) == std::string::npos) continue;
      const auto e = parse_event_line(*line);
      if (e.ok() && e->event() == *start) return e->time();
    }
  return 0;
}

bool is_run_of(const std::string& run, const std::string& job_name) {
  if (job_name.empty()) return true;
  const auto text = read_file(job_path(run));
  if (!text.ok()) return false;
  const auto job = jobfile::parse_job(*text, {job_path(run), run});
  return job.ok() && job->job().name() == job_name;
}

std::string not_a_run(const std::string& path) {
  if (path_exists(job_path(path)))
    return fmt::format(
        "{}: not a run directory (its job.toml is a job file, not that of a "
        "run); to start a run of it: remesh run {}",
        path, shell_quoted(job_path(path)));
  return path + ": not a run directory (it has no job.toml)" +
         (path_exists(metrics_path(path))
              ? "; to continue it with its job file: remesh run JOB --resume "
                "--run-dir " +
                    typed_path(path)
              : "");
}

// "<name>-20261121-161810" for a run that starts at `unix_s` (local time).
Result<std::string> new_run(const std::string& dump_folder,
                            const std::string& job_name, double unix_s) {
  const std::string name = absolute_path(dump_folder + "/" + job_name +
                                         time_text(unix_s, "-%Y%m%d-%H%M%S"));
  std::error_code error;
  fs::create_directories(absolute_path(dump_folder), error);
  constexpr int kTries = 1000;
  for (int n = 1; !error && n <= kTries; ++n) {
    const std::string run = n == 1 ? name : fmt::format("{}-{}", name, n);
    if (fs::create_directory(run, error)) return run;
  }
  return io_error(fmt::format("{}: cannot create: {}", name,
                              error ? error.message() : "exists"));
}

Status several_runs(const std::vector<std::string>& live) {
  std::string out = "several runs are training; name one of them:";
  for (const std::string& run : live)
    out += fmt::format("\n  {}  (step {}, coordinator pid {})", typed_path(run),
                       last_finished_step(run), RunLock::holder(run));
  return invalid_argument(out);
}

}  // namespace

Status create(const std::string& run) {
  std::error_code error;
  fs::create_directories(logs_path(run), error);
  if (error)
    return io_error(logs_path(run) + ": cannot create: " + error.message());
  return ok_status();
}

Result<std::string> read_file(const std::string& path) {
  constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
  return remesh::read_file(*posix_file_system(), path, kMaxBytes);
}

RunLock::RunLock(std::string run)
    : run_(std::move(run)), path_(lock_path(run_)) {}

Result<std::unique_ptr<RunLock>> RunLock::acquire(const std::string& run) {
  if (!limits::is_printable(run, 4 * limits::kMaxText))
    return invalid_argument(limits::printable(run) +
                            ": has control characters, or is not UTF-8; give "
                            "another --run-dir");
  const auto files = posix_file_system();
  std::unique_ptr<RunLock> lock(new RunLock(run));
  lock->was_there_ = path_exists(run);
  // A holder whose start fails removes the file, and the directory with it.
  constexpr int kTries = 100;
  for (int tries = 0;; ++tries) {
    Status taken = create(run);
    if (taken.ok()) taken = lock->take();
    if (taken.ok() && is_at(lock->fd_, lock->path_)) break;
    if (taken.code() == Code::kAlreadyExists) return taken;
    if (tries < kTries) continue;
    if (taken.ok()) return unavailable(lock->path_ + ": is removed repeatedly");
    lock->remove_empty(*files);
    return taken;
  }
  lock->was_run_ = is_run(run) || files->exists(journal_path(run)) ||
                   files->exists(metrics_path(run));
  // The time tells two processes of one pid apart.
  lock->text_ =
      fmt::format("{} {} {:.6f}\n", getpid(), host_name(), unix_seconds());
  // In place: that succeeds on a full disk, too, if it has the block.
  const auto size = static_cast<ssize_t>(lock->text_.size());
  if (pwrite(lock->fd_, lock->text_.data(), lock->text_.size(), 0) != size ||
      ftruncate(lock->fd_, size) != 0) {
    Status failed = errno_error(lock->path_ + ": write", errno);
    lock->remove_unstarted(*files);
    return failed;
  }
  return lock;
}

Status RunLock::take() {
  if (fd_ >= 0) close(fd_);
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd_ < 0) return errno_error(path_ + ": open", errno);
  // holder() takes the lock briefly, so one refusal does not prove anything.
  constexpr int kTries = 10;
  for (int i = 0; i < kTries; ++i) {
    if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return ok_status();
    if (errno != EWOULDBLOCK) return errno_error(path_ + ": flock", errno);
    usleep(10'000);
  }
  return already_exists(fmt::format(
      "{}: another coordinator ({}) runs this job. `remesh status {}` shows "
      "it, `remesh stop {}` ends the job. If that host is cut off, end the "
      "process there: this run has no other coordinator before",
      run_, read_holder(fd_).to_text(), typed_path(run_), typed_path(run_)));
}

Status RunLock::check() {
  (void)futimens(fd_, nullptr);
  // A network file system looks for the newest file when one is opened.
  const Descriptor fd(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  const int error = fd.get() < 0 ? errno : 0;
  struct stat st {};
  gone_ = error == ENOENT && stat(run_.c_str(), &st) != 0 && errno == ENOENT;
  if (gone_)
    return not_found(run_ +
                     ": the run directory is gone; put it back, or end "
                     "the run");
  if (error != 0 && error != ENOENT) return ok_status();  // nobody knows
  const Holder there = error != 0 ? Holder{} : read_holder(fd.get());
  if (!there.text.empty() && there.text != text_)
    return cancelled(fmt::format("{}: another coordinator ({}) has taken over",
                                 path_, there.to_text()));
  if (error == 0 && is_at(fd_, path_)) return ok_status();
  return cancelled(path_ +
                   ": the lock of this coordinator was removed or replaced, so "
                   "another coordinator may have started");
}

int RunLock::holder(const std::string& run) {
  const Descriptor fd(open(lock_path(run).c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return 0;
  // A shared lock that is released at once: concurrent callers do not disturb
  // each other, and a coordinator that starts meanwhile retries.
  return flock(fd.get(), LOCK_SH | LOCK_NB) != 0 ? read_holder(fd.get()).pid
                                                 : 0;
}

RunLock::~RunLock() {
  if (fd_ >= 0) close(fd_);
}

Status RunLock::begin(FileSystem& fs) {
  if (!was_run_) {
    remove_temporaries(fs, journal_path(run_));  // of a start that was killed
    RETURN_IF_ERROR(check_unused(fs, run_));
  }
  begun_ = true;
  return ok_status();
}

void RunLock::remove_unstarted(FileSystem& fs) const {
  if (was_run_) return;
  if (begun_) {
    remove_temporaries(fs, journal_path(run_));
    for (const std::string& path :
         {journal_path(run_), metrics_path(run_), events_path(run_),
          job_path(run_), endpoint_path(run_), secret_path(run_),
          coordinator_log_path(run_)})
      (void)fs.remove(path).ok();
  }
  (void)fs.remove(path_).ok();
  (void)fs.remove(traces_path(run_)).ok();
  remove_empty(fs);
}

// One that was there may be a mount point.
void RunLock::remove_empty(FileSystem& fs) const {
  (void)fs.remove(logs_path(run_)).ok();
  if (!was_there_) (void)fs.remove(run_).ok();
}

std::string typed_path(const std::string& path) {
  return shell_quoted(short_path(path));
}

Status check_unused(FileSystem& fs, const std::string& run) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.list(run));
  for (const std::string& name : names) {
    const std::string path = path_join(run, name);
    if (path == lock_path(run) || path == logs_path(run) ||
        path == keys_path(run) || path == secret_path(run) ||
        name == "checkpoints")
      continue;
    const auto inside = fs.list(path);
    if (inside.ok() && inside->empty()) continue;
    return invalid_argument(fmt::format(
        "{}: has other files ({}) and is no run; give a new or empty folder as "
        "--run-dir",
        run,
        path == job_path(run) ? "job.toml, which no run has written" : name));
  }
  return ok_status();
}

uint64_t new_run_id(const std::string& run) {
  std::random_device random;
  return std::max<uint64_t>(
      1, hash64(fmt::format("{} {:.6f} {} {}", run, unix_seconds(), getpid(),
                            random())));
}

std::string run_secret(FileSystem& fs, const std::string& run) {
  const std::string path = secret_path(run);
  if (fs.exists(path)) {
    const auto text = remesh::read_file(fs, path, kSecretBytes);
    if (text.ok() && text->size() == kSecretBytes) return *text;
    // A file that cannot be read now may be readable at the next start.
    if (text.ok() || text.status().code() == Code::kCorrupt)
      (void)fs.remove(path).ok();
  }
  std::string secret = new_secret();
  if (create_private_file(path, secret).ok()) (void)fs.sync_dir(run).ok();
  return secret;
}

void point_latest(const std::string& dump_folder, const std::string& run) {
  const fs::path link = fs::path(dump_folder) / "latest";
  std::error_code error;
  if (fs::symlink_status(link, error).type() != fs::file_type::symlink &&
      fs::exists(link, error)) {
    return;
  }
  // A link is relative to where the folder is, not to how it was reached.
  const fs::path target =
      fs::weakly_canonical(run, error)
          .lexically_relative(fs::weakly_canonical(dump_folder, error));
  const fs::path beside = link.string() + fmt::format(".{}", getpid());
  fs::create_directory_symlink(target.empty() ? fs::path(run) : target, beside,
                               error);
  if (error) return;
  fs::rename(beside, link, error);
  if (error) fs::remove(beside, error);
}

// A job.toml may also be the user's own.
bool is_run(const std::string& path) {
  if (path_exists(endpoint_path(path))) return true;
  if (!path_exists(job_path(path))) return false;
  if (path_exists(journal_path(path))) return true;
  const auto text = read_file(job_path(path));
  return text.ok() && jobfile::is_written_by_run(*text);
}

std::optional<RunEnd> end_of_run(const std::string& run) {
  const auto last = parse_event_line(read_last_line(events_path(run)));
  if (!last.ok()) return std::nullopt;
  const auto outcome = events::outcome_of(last->event());
  if (outcome == pb::JobStatus::UNKNOWN) return std::nullopt;
  return RunEnd{outcome, last->cause(), end_detail(*last), last->step(),
                last->time()};
}

std::string end_detail(const pb::EventRecord& e) {
  if (e.seconds() <= 0) return e.detail();
  return e.detail() + " until " + time_of_day(e.time() + e.seconds());
}

std::string end_text(const RunEnd& end, const std::string& run) {
  const bool done = end.outcome == pb::JobStatus::DONE;
  std::string out = fmt::format("{} at step {}, {}",
                                done ? "finished" : state_text(end.outcome),
                                end.step, date_text(end.time));
  if (!end.cause.empty()) out += ": " + end.cause;
  if (!end.detail.empty()) out += "; " + end.detail;
  out += fmt::format("; to {}: remesh resume {}",
                     done ? "train further" : "continue", typed_path(run));
  if (done) out += fmt::format(" --set train.steps={}", 2 * end.step);
  return out;
}

std::string date_text(double unix_s) {
  return time_text(unix_s, "%Y-%m-%d %H:%M:%S %Z");
}

std::string time_of_day(double unix_s) { return time_text(unix_s, "%H:%M:%S"); }

std::string short_path(const std::string& path) {
  std::error_code error;
  const auto here = fs::current_path(error);
  if (error) return path;
  const std::string near = fs::path(path).lexically_relative(here).string();
  return near.empty() || near.starts_with("..") ? path : near;
}

Result<std::string> newest_run(const std::string& dump_folder,
                               const std::string& job_name) {
  std::set<std::string> runs;  // the link "latest" may point elsewhere
  for (const fs::path& path : entries_of(dump_folder))
    if (is_run(path.string())) runs.insert(real_path(path.string()));
  std::pair<double, std::string> best;
  for (const std::string& run : runs) {
    const std::pair<double, std::string> here = {started_at(run), run};
    if (here.first > 0 && here > best && is_run_of(run, job_name)) best = here;
  }
  if (best.second.empty()) {
    return not_found(fmt::format(
        "no run{} in {}",
        job_name.empty() ? "" : " of job \"" + job_name + "\"", dump_folder));
  }
  return best.second;
}

Result<std::string> choose_run(const std::string& dump_folder,
                               const std::string& job_name,
                               const std::string& given, bool resume,
                               double unix_s) {
  if (!given.empty() && resume && !is_run(absolute_path(given)) &&
      !path_exists(metrics_path(absolute_path(given)))) {
    return not_found("nothing to resume: " + not_a_run(absolute_path(given)));
  }
  if (!given.empty()) {
    // Resolve "runs/latest" now, because it may point elsewhere later.
    return real_path(given);
  }
  if (resume) {
    Result<std::string> newest = newest_run(dump_folder, job_name);
    if (newest.ok()) return newest;
    return not_found("nothing to resume: " + newest.status().message() +
                     "; name one with --run-dir, or start without --resume");
  }
  return new_run(dump_folder, job_name, unix_s);
}

Result<std::string> find_run(const std::string& named) {
  if (named.empty()) {
    const std::vector<std::string> live = live_runs();
    if (live.size() == 1) return live[0];
    if (live.size() > 1) return several_runs(live);
    Result<std::string> newest = newest_run(absolute_path("runs"), "");
    if (newest.ok()) return newest;
    const std::vector<std::string> known = known_runs();
    if (!known.empty()) return known.back();
    return not_found(newest.status().message() +
                     "; name a run directory or an address, tcp://HOST:PORT");
  }
  if (is_run(named)) return real_path(named);
  const std::string path = absolute_path(named);
  std::error_code error;
  if (!fs::exists(job_path(path), error) && error)  // it may be a run
    return errno_error(path, error.value());
  if (!path_exists(path)) return not_found(path + ": no such run");
  return not_found(not_a_run(path));
}

}  // namespace remesh::rundir
