#include "coordinator/ctl/children.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <thread>
#include <utility>

#include "coordinator/rundir/line_file.h"
#include "proto/base/check.h"
#include "proto/base/child.h"
#include "proto/base/clock.h"

namespace remesh::ctl {
namespace {

constexpr char kOwnDescriptors[] = "/proc/self/fd/";  // links of the kernel

// All children of this process, adopted orphans included.
std::vector<int> children_of_self() {
  std::vector<int> out;
  std::ifstream in(fmt::format("/proc/self/task/{}/children", getpid()));
  for (int pid = 0; in >> pid;) out.push_back(pid);
  return out;
}

}  // namespace

Output::Output() : fd_(memfd_create("output", MFD_CLOEXEC)) {
  CHECK_MSG(fd_ >= 0, "memfd_create");
  path_ = fmt::format("{}{}", kOwnDescriptors, fd_);
}

Output::Output(Output&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

Output::~Output() {
  if (fd_ >= 0) close(fd_);
}

std::vector<std::string> Output::lines() const {
  return rundir::read_lines(path_);
}

int open_output(const std::string& path) {
  const int follow = path.starts_with(kOwnDescriptors) ? 0 : O_NOFOLLOW;
  return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | follow,
              0644);
}

void Output::clear() { (void)!ftruncate(fd_, 0); }

Children::Children() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

Children::~Children() { kill_all(); }

Result<int> Children::start(int child, const std::vector<std::string>& argv,
                            const std::string& log, const std::string& input) {
  const int log_fd = open_output(log);
  if (log_fd < 0) return errno_error(log + ": open", errno);
  const auto started = start_child({.argv = argv,
                                    .input = input,
                                    .output_fd = log_fd,
                                    .patience_ms = -1,
                                    .oom_victim = false,
                                    .keep_ignored = true});
  close(log_fd);
  if (!started.ok()) return started.status();
  if (started->pidfd >= 0) close(started->pidfd);
  children_[started->pid] = child;
  return started->pid;
}

std::vector<Ended> Children::reap() {
  std::vector<Ended> out;
  int status = 0;
  for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    Ended e{.pid = pid};
    const auto it = children_.find(pid);
    if (it != children_.end()) {
      e.child = it->second;
      children_.erase(it);
    }
    if (WIFSIGNALED(status)) e.signal = WTERMSIG(status);
    if (WIFEXITED(status)) e.exit_code = WEXITSTATUS(status);
    out.push_back(e);
  }
  return out;
}

void Children::signal(int child, int signal) {
  for (const auto& [pid, number] : children_) {
    if (number == child) kill(pid, signal);
  }
}

std::vector<int> Children::kill_all() {
  constexpr int64_t kPatienceMs = 5000;
  const int64_t until_ms = monotonic_ms() + kPatienceMs;
  std::vector<int> left;
  // Orphans become our children when their parent is reaped, so the list is
  // read again until it is empty.
  for (;;) {
    for (const auto& [pid, number] : children_) kill(pid, SIGKILL);
    for (const int pid : children_of_self()) kill(pid, SIGKILL);
    int status = 0;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid > 0) children_.erase(pid);
    if (pid < 0 && errno != EINTR) break;
    if (pid != 0) continue;
    if (monotonic_ms() > until_ms) {
      left = children_of_self();
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  children_.clear();
  return left;
}

}  // namespace remesh::ctl
