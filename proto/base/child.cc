#include "proto/base/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "proto/base/clock.h"

namespace remesh {
namespace {

[[noreturn]] void fail_child(int error_fd) {
  const int err = errno;
  signal(SIGPIPE, SIG_IGN);  // the parent does not wait for long
  (void)!write(error_fd, &err, sizeof(err));
  _exit(127);
}

void reset_signals(bool keep_ignored) {
  for (const int s : {SIGINT, SIGPIPE, SIGTERM}) signal(s, SIG_DFL);
  // Handlers end with exec.
  for (int s = 1; s < 65 && !keep_ignored; ++s) signal(s, SIG_DFL);
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

// In the child, until exec. The parent has threads, so only async-signal-safe
// calls are allowed: no allocation, no locks.
[[noreturn]] void run_child(const ChildOptions& o, char* const* argv,
                            char* const* envp, int pipe_fd, pid_t parent) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail_child(pipe_fd);
  if (getppid() != parent) _exit(127);  // it died before the prctl
  setpgid(0, 0);
  reset_signals(o.keep_ignored);
  if (o.oom_victim) prefer_as_oom_victim();
  const int in = open(o.input.c_str(), O_RDONLY);
  const int out =
      o.output_fd >= 0
          ? fcntl(o.output_fd, F_DUPFD_CLOEXEC, 10)
          : open(o.output.c_str(),
                 O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW, 0666);
  if (in < 0 || out < 0) fail_child(pipe_fd);
  // Move them out of the way of the descriptors assigned below.
  const int error_fd = fcntl(pipe_fd, F_DUPFD_CLOEXEC, 10);
  const int pass = o.pass_fd < 0 ? -1 : fcntl(o.pass_fd, F_DUPFD_CLOEXEC, 10);
  if (error_fd < 0 || (o.pass_fd >= 0 && pass < 0)) fail_child(pipe_fd);
  if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0)
    fail_child(error_fd);
  if (pass >= 0 && dup2(pass, kChildFd) < 0) fail_child(error_fd);
  // Libraries may have opened descriptors without close-on-exec.
  close_range(pass >= 0 ? kChildFd + 1 : kChildFd, ~0U, CLOSE_RANGE_CLOEXEC);
  if (std::strchr(argv[0], '/') != nullptr)
    execve(argv[0], argv, envp);
  else
    execvpe(argv[0], argv, envp);
  fail_child(error_fd);
}

}  // namespace

std::vector<char*> exec_arguments(const std::vector<std::string>& words) {
  std::vector<char*> out;
  for (const std::string& w : words)
    out.push_back(const_cast<char*>(w.c_str()));
  out.push_back(nullptr);
  return out;
}

Result<Child> start_child(const ChildOptions& options) {
  const std::string what = "start " + options.argv[0];
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return errno_error(what + ": pipe", errno);
  const std::vector<char*> argv = exec_arguments(options.argv);
  const std::vector<char*> envp = exec_arguments(options.env);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0)
    run_child(options, argv.data(), options.env.empty() ? environ : envp.data(),
              ends[1], parent);
  const int fork_error = errno;
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return errno_error(what + ": fork", fork_error);
  }
  setpgid(pid, pid);  // parent and child race; either may do it first
  int child_error = 0;
  ssize_t n = 0;
  pollfd ended{ends[0], POLLIN, 0};
  do {
    n = poll(&ended, 1, options.patience_ms);
    if (n > 0) n = read(ends[0], &child_error, sizeof(child_error));
  } while (n < 0 && errno == EINTR);
  close(ends[0]);
  if (n > 0) {
    waitpid(pid, nullptr, 0);
    return errno_error(options.output.empty()
                           ? what
                           : what + " (output to " + options.output + ")",
                       child_error);
  }
  Child child;
  child.pid = pid;
  child.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  return child;
}

int wait_or_kill(const Child& child, int64_t timeout_ms) {
  int status = -1;
  bool killed = false;
  for (int64_t end = monotonic_ms() + timeout_ms;
       waitpid(child.pid, &status, WNOHANG) == 0;) {
    if (monotonic_ms() >= end) {
      if (killed) break;
      killed = true;
      kill(child.pid, SIGKILL);
      end += timeout_ms;
    }
    pollfd ended{child.pidfd, POLLIN, 0};
    poll(&ended, child.pidfd >= 0 ? 1 : 0, 5);
  }
  if (child.pidfd >= 0) close(child.pidfd);
  return killed ? -1 : status;
}

}  // namespace remesh
