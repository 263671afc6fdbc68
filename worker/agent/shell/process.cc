#include "worker/agent/shell/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "proto/base/clock.h"

namespace remesh::agent {
namespace {

constexpr unsigned kCloseRangeCloexec = 1U << 2;
constexpr int kExecPatienceMs = 250;

// Input of the child between fork and exec. The parent has threads, so only
// async-signal-safe calls are allowed: no allocation, no locks.
struct ChildPlan {
  const char* path = nullptr;
  char* const* argv = nullptr;
  char* const* envp = nullptr;
  const char* output = nullptr;
  int output_fd = -1;
  int pass_fd = -1;
  int error_fd = -1;
  pid_t parent = 0;
};

[[noreturn]] void fail_child(int error_fd) {
  const int err = errno;
  signal(SIGPIPE, SIG_IGN);  // the parent does not wait for long
  (void)!write(error_fd, &err, sizeof(err));
  _exit(127);
}

void reset_signals() {
  for (int s = 1; s < 65; ++s) signal(s, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

void prefer_as_oom_victim() {
  const int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  char own[8] = {};
  (void)!read(fd, own, sizeof(own) - 1);
  // A larger one is kept, such as 1000 of a container to be killed first.
  int score = 0;
  for (const char* c = own; *c >= '0' && *c <= '9'; ++c)
    score = 10 * score + (*c - '0');
  if (score < 500) (void)!pwrite(fd, "500", 3, 0);
  close(fd);
}

[[noreturn]] void run_child(const ChildPlan& plan) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail_child(plan.error_fd);
  if (getppid() != plan.parent) _exit(127);  // it died before the prctl
  setpgid(0, 0);
  reset_signals();
  prefer_as_oom_victim();
  const int in = open("/dev/null", O_RDONLY);
  const int out =
      plan.output_fd >= 0
          ? fcntl(plan.output_fd, F_DUPFD_CLOEXEC, 10)
          : open(plan.output,
                 O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW, 0666);
  if (in < 0 || out < 0) fail_child(plan.error_fd);
  // Move them out of the way of the descriptors assigned below.
  const int error_fd = fcntl(plan.error_fd, F_DUPFD_CLOEXEC, 10);
  const int pass =
      plan.pass_fd < 0 ? -1 : fcntl(plan.pass_fd, F_DUPFD_CLOEXEC, 10);
  if (error_fd < 0 || (plan.pass_fd >= 0 && pass < 0))
    fail_child(plan.error_fd);
  if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0)
    fail_child(error_fd);
  if (pass >= 0 && dup2(pass, kChildFd) < 0) fail_child(error_fd);
  // Libraries may have opened descriptors without close-on-exec.
  syscall(SYS_close_range, pass >= 0 ? kChildFd + 1 : kChildFd, ~0U,
          kCloseRangeCloexec);
  execve(plan.path, plan.argv, plan.envp);
  fail_child(error_fd);
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> out;
  for (const std::string& w : words)
    out.push_back(const_cast<char*>(w.c_str()));
  out.push_back(nullptr);
  return out;
}

bool same_process_lives(const ProcessId& p) {
  const auto stat = read_proc_stat(p.pid);
  return stat && stat->start_time == p.start_time && stat->state != 'Z' &&
         stat->state != 'X';
}

}  // namespace

Result<Child> start_child(const ChildOptions& options) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    return errno_error("start a rank: pipe", errno);
  const std::vector<char*> argv = pointers(options.argv);
  const std::vector<char*> envp = pointers(options.env);
  const ChildPlan plan{.path = options.argv[0].c_str(),
                       .argv = argv.data(),
                       .envp = envp.data(),
                       .output = options.output.c_str(),
                       .output_fd = options.output_fd,
                       .pass_fd = options.pass_fd,
                       .error_fd = ends[1],
                       .parent = getpid()};
  const pid_t pid = fork();
  if (pid == 0) run_child(plan);
  const int fork_error = errno;
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return errno_error("start a rank: fork", fork_error);
  }
  setpgid(pid, pid);  // parent and child race; either may do it first
  int child_error = 0;
  ssize_t n = 0;
  pollfd ended{ends[0], POLLIN, 0};
  do {
    n = poll(&ended, 1, kExecPatienceMs);
    if (n > 0) n = read(ends[0], &child_error, sizeof(child_error));
  } while (n < 0 && errno == EINTR);
  close(ends[0]);
  if (n > 0) {
    waitpid(pid, nullptr, 0);
    return errno_error(
        "start " + options.argv[0] + " (output to " + options.output + ")",
        child_error);
  }
  Child child;
  child.pid = pid;
  child.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  return child;
}

std::optional<ProcStat> parse_proc_stat(const std::string& text) {
  // The name, in parentheses, may itself contain spaces and parentheses.
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream in(text.substr(end + 1));
  ProcStat out;
  std::string skip;
  if (!(in >> out.state)) return std::nullopt;
  for (int field = 4; field <= 21; ++field)
    if (!(in >> skip)) return std::nullopt;
  uint64_t pages = 0;
  if (!(in >> out.start_time >> skip >> pages)) return std::nullopt;
  out.rss_bytes = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return out;
}

std::optional<ProcStat> read_proc_stat(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  char text[1024];
  const ssize_t n = read(fd, text, sizeof(text));
  close(fd);
  if (n <= 0) return std::nullopt;
  return parse_proc_stat(std::string(text, static_cast<size_t>(n)));
}

int kill_leftovers(const std::vector<ProcessId>& processes, int timeout_ms) {
  std::vector<ProcessId> alive;
  for (const ProcessId& p : processes)
    if (same_process_lives(p)) alive.push_back(p);
  const int found = static_cast<int>(alive.size());
  for (const ProcessId& p : alive) {
    kill(-p.pid, SIGKILL);
    kill(p.pid, SIGKILL);
  }
  const int64_t end = monotonic_ms() + timeout_ms;
  while (!alive.empty() && monotonic_ms() < end) {
    std::erase_if(alive,
                  [](const ProcessId& p) { return !same_process_lives(p); });
    if (!alive.empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return found;
}

std::string path_of_program(const std::string& path, int fd) {
  struct stat now {
  }, then{};
  if (fd < 0 || fstat(fd, &then) != 0) return path;
  const bool same = stat(path.c_str(), &now) == 0 &&
                    now.st_dev == then.st_dev && now.st_ino == then.st_ino;
  return same ? path : "/proc/self/fd/" + std::to_string(fd);
}

Status restart_process() {
  std::vector<std::string> words;
  std::ifstream in("/proc/self/cmdline");
  for (std::string word; std::getline(in, word, '\0');) words.push_back(word);
  // Also if the file has been replaced since.
  const std::string program = "/proc/self/exe";
  (void)syscall(SYS_close_range, kChildFd, ~0U, kCloseRangeCloexec);
  execv(program.c_str(), pointers(words).data());
  return io_error(program + ": " + std::strerror(errno));
}

}  // namespace remesh::agent
