#include "coordinator/rundir/run_dir.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace remesh::rundir {
namespace {

namespace fs = std::filesystem;

// Length of "-20261121-161810".
constexpr size_t kStampLength = 16;

// The time stamp a run's name ends with, or "".
std::string stamp_of(const std::string& name) {
  if (name.size() <= kStampLength) return "";
  std::string stamp = name.substr(name.size() - kStampLength);
  for (size_t i = 0; i < stamp.size(); ++i) {
    const bool dash = i == 0 || i == 9;
    if (dash ? stamp[i] != '-'
             : std::isdigit(static_cast<unsigned char>(stamp[i])) == 0) {
      return "";
    }
  }
  return stamp;
}

int parse_pid(std::string_view text) {
  int pid = 0;
  std::from_chars(text.data(), text.data() + text.size(), pid);
  return pid;
}

}  // namespace

Status create(const std::string& run) {
  std::error_code error;
  fs::create_directories(logs_path(run), error);
  if (error) {
    return io_error(logs_path(run) + ": cannot create: " + error.message());
  }
  return ok_status();
}

Result<std::string> read_file(const std::string& path) {
  constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
  return remesh::read_file(*posix_file_system(), path, kMaxBytes);
}

std::string absolute(const std::string& path) {
  std::error_code error;
  fs::path full = fs::absolute(path, error);
  if (error) return path;
  full = full.lexically_normal();
  if (full.has_relative_path() && full.filename().empty()) {
    full = full.parent_path();  // "runs/a/" is runs/a
  }
  return full.string();
}

std::string endpoint_text(const Endpoint& e) {
  return fmt::format("{}\npid={}\nhost={}\nbound={}\n", e.address, e.pid,
                     e.host, e.bound);
}

Result<Endpoint> parse_endpoint(const std::string& text) {
  std::istringstream in(text);
  Endpoint e;
  std::getline(in, e.address);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("pid=")) e.pid = parse_pid(line.substr(4));
    if (line.starts_with("host=")) e.host = line.substr(5);
    if (line.starts_with("bound=")) e.bound = line.substr(6);
  }
  if (!e.address.starts_with("tcp://")) {
    return corrupt("not an address: \"" + e.address.substr(0, 60) +
                   "\"; expected tcp://HOST:PORT");
  }
  return e;
}

Status write_endpoint(FileSystem& fs, const std::string& run,
                      const Endpoint& endpoint) {
  return write_file_atomically(fs, endpoint_path(run), endpoint_text(endpoint));
}

Result<Endpoint> read_endpoint(const std::string& run) {
  ASSIGN_OR_RETURN(const std::string text, read_file(endpoint_path(run)));
  Result<Endpoint> endpoint = parse_endpoint(text);
  if (!endpoint.ok()) return endpoint.status().with_context(endpoint_path(run));
  return endpoint;
}

void remove_endpoint(FileSystem& fs, const std::string& run) {
  if (fs.remove(endpoint_path(run)).ok()) (void)fs.sync_dir(run).ok();
}

bool process_alive(int pid) {
  if (pid <= 0) return false;
  if (kill(pid, 0) != 0 && errno == ESRCH) return false;
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(stat, text);
  // The state follows the name in brackets, which may contain anything.
  const size_t at = text.rfind(") ");
  if (at == std::string::npos) return false;
  const char state = text[at + 2];
  return state != 'Z' && state != 'X';
}

Result<std::unique_ptr<RunLock>> RunLock::acquire(const std::string& run) {
  const std::string path = lock_path(run);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return errno_error(path + ": open", errno);
  std::unique_ptr<RunLock> lock(new RunLock(fd));
  // holder() takes the lock briefly, so one refusal does not prove anything.
  bool locked = false;
  for (int i = 0; i < 10 && !locked; ++i) {
    locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (locked) break;
    if (errno != EWOULDBLOCK) return errno_error(path + ": flock", errno);
    usleep(10'000);
  }
  if (!locked) {
    char text[32] = {};
    const ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    const int pid = n > 0 ? parse_pid(text) : 0;
    return already_exists(fmt::format(
        "{}: another coordinator (pid {}) runs this job. `remesh status {}` "
        "shows it, `remesh stop {}` ends the job",
        run, pid > 0 ? std::to_string(pid) : "unknown", run, run));
  }
  const std::string text = fmt::format("{}\n", getpid());
  if (ftruncate(fd, 0) != 0 || pwrite(fd, text.data(), text.size(), 0) !=
                                   static_cast<ssize_t>(text.size())) {
    return errno_error(path + ": write", errno);
  }
  return lock;
}

int RunLock::holder(const std::string& run) {
  const int fd = open(lock_path(run).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  int pid = 0;
  // A shared lock that is released at once: concurrent callers do not disturb
  // each other, and a coordinator that starts meanwhile retries.
  if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
    char text[32] = {};
    if (pread(fd, text, sizeof(text) - 1, 0) > 0) pid = parse_pid(text);
  }
  close(fd);
  return pid;
}

RunLock::~RunLock() { close(fd_); }

std::string new_run_name(const std::string& job_name, double unix_s) {
  const auto seconds = static_cast<time_t>(std::floor(unix_s));
  tm parts{};
  localtime_r(&seconds, &parts);
  char stamp[32];
  strftime(stamp, sizeof(stamp), "-%Y%m%d-%H%M%S", &parts);
  return job_name + stamp;
}

void point_latest(const std::string& dump_folder, const std::string& run) {
  const fs::path link = fs::path(dump_folder) / "latest";
  std::error_code error;
  if (fs::symlink_status(link, error).type() != fs::file_type::symlink &&
      fs::exists(link, error)) {
    return;
  }
  const fs::path target = fs::path(run).lexically_relative(dump_folder);
  const fs::path beside = link.string() + fmt::format(".{}", getpid());
  fs::create_directory_symlink(target.empty() ? fs::path(run) : target, beside,
                               error);
  if (error) return;
  fs::rename(beside, link, error);
  if (error) fs::remove(beside, error);
}

bool is_run(const std::string& path) {
  std::error_code error;
  return fs::exists(job_path(path), error) ||
         fs::exists(endpoint_path(path), error);
}

Result<std::string> newest_run(const std::string& dump_folder,
                               const std::string& job_name) {
  std::string best;
  std::string best_stamp;
  std::error_code error;
  for (fs::directory_iterator it(dump_folder, error), end; it != end;
       it.increment(error)) {
    if (error) break;
    const std::string name = it->path().filename().string();
    const std::string stamp = stamp_of(name);
    if (stamp.empty() || !is_run(it->path().string())) continue;
    const std::string prefix = name.substr(0, name.size() - kStampLength);
    if (!job_name.empty() && prefix != job_name) continue;
    if (stamp > best_stamp || (stamp == best_stamp && name > best)) {
      best = name;
      best_stamp = stamp;
    }
  }
  if (best.empty()) {
    return not_found(fmt::format(
        "no run{} in {}",
        job_name.empty() ? "" : " of job \"" + job_name + "\"", dump_folder));
  }
  return dump_folder + "/" + best;
}

Result<std::string> choose_run(const std::string& dump_folder,
                               const std::string& job_name,
                               const std::string& given, bool resume,
                               double unix_s) {
  if (!given.empty() && resume && !is_run(absolute(given))) {
    return not_found("nothing to resume: " + absolute(given) +
                     " is not a run directory (it has no job.toml)");
  }
  if (!given.empty()) {
    // Resolve "runs/latest" now, because it may point elsewhere later.
    std::error_code error;
    const fs::path real = fs::canonical(given, error);
    return error ? absolute(given) : real.string();
  }
  if (resume) {
    Result<std::string> newest = newest_run(dump_folder, job_name);
    if (newest.ok()) return absolute(*newest);
    return not_found("nothing to resume: " + newest.status().message() +
                     "; name one with --run-dir, or start without --resume");
  }
  return absolute(dump_folder + "/" + new_run_name(job_name, unix_s));
}

Result<std::string> find_run(const std::string& named) {
  if (named.empty()) {
    const std::string runs = absolute("runs");
    std::error_code error;
    // Of several runs, the one started or resumed last.
    if (is_run(runs + "/latest")) {
      const fs::path real = fs::canonical(runs + "/latest", error);
      if (!error) return real.string();
    }
    Result<std::string> newest = newest_run(runs, "");
    if (newest.ok()) return newest;
    return not_found(newest.status().message() +
                     "; name a run directory or an address, tcp://HOST:PORT");
  }
  std::string path = absolute(named);
  if (is_run(path)) {
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    return error ? path : real.string();
  }
  std::error_code error;
  if (!fs::exists(path, error)) return not_found(path + ": no such run");
  return not_found(path + ": not a run directory (it has no job.toml)");
}

}  // namespace remesh::rundir
