#include "coordinator/ctl/children.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace remesh::ctl {
namespace {

constexpr int kExecFailed = 127;

// In the child, between fork and exec: only what is async-signal-safe.
[[noreturn]] void become(char* const* argv, int log_fd, int null_fd,
                         int error_fd, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);  // it died meanwhile
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  dup2(null_fd, STDIN_FILENO);
  dup2(log_fd, STDOUT_FILENO);
  dup2(log_fd, STDERR_FILENO);
  execv(argv[0], argv);
  const int err = errno;
  (void)!write(error_fd, &err, sizeof(err));
  _exit(kExecFailed);
}

// Children of this process, whoever started them.
std::vector<int> children_of_self() {
  std::vector<int> out;
  std::ifstream in(fmt::format("/proc/self/task/{}/children", getpid()));
  for (int pid = 0; in >> pid;) out.push_back(pid);
  return out;
}

}  // namespace

std::string how_it_ended(const Ended& e) {
  if (e.signal == 0) return fmt::format("exited with code {}", e.exit_code);
  return fmt::format("was ended by signal {} ({})", e.signal,
                     strsignal(e.signal));
}

Children::Children() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

Children::~Children() { kill_all(); }

Result<int> Children::start(const std::string& name,
                            const std::vector<std::string>& argv,
                            const std::string& log) {
  std::vector<char*> raw;
  for (const std::string& a : argv) raw.push_back(const_cast<char*>(a.c_str()));
  raw.push_back(nullptr);
  const int log_fd =
      open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log_fd < 0) return errno_error(log + ": open", errno);
  const int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  int error[2] = {-1, -1};
  if (null_fd < 0 || pipe2(error, O_CLOEXEC) != 0) {
    const int err = errno;
    close(log_fd);
    if (null_fd >= 0) close(null_fd);
    return errno_error("start " + argv[0], err);
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) become(raw.data(), log_fd, null_fd, error[1], parent);
  int err = pid < 0 ? errno : 0;
  for (const int fd : {log_fd, null_fd, error[1]}) close(fd);
  // Nothing comes, but the end of the pipe, when exec worked.
  if (pid > 0 && read(error[0], &err, sizeof(err)) == sizeof(err)) {
    waitpid(pid, nullptr, 0);
  }
  close(error[0]);
  if (err != 0) return errno_error("start " + argv[0], err);
  pids_[pid] = name;
  return pid;
}

std::vector<Ended> Children::reap() {
  std::vector<Ended> out;
  int status = 0;
  for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    Ended e{.pid = pid};
    const auto it = pids_.find(pid);
    if (it != pids_.end()) {
      e.name = it->second;
      pids_.erase(it);
    }
    if (WIFSIGNALED(status)) e.signal = WTERMSIG(status);
    if (WIFEXITED(status)) e.exit_code = WEXITSTATUS(status);
    out.push_back(std::move(e));
  }
  return out;
}

bool Children::running(const std::string& name) const {
  for (const auto& [pid, n] : pids_) {
    if (n == name) return true;
  }
  return false;
}

void Children::signal(const std::string& name, int signal) {
  for (const auto& [pid, n] : pids_) {
    if (n == name) kill(pid, signal);
  }
}

void Children::kill_all() {
  // Orphans become our children when their parent is reaped, so the list is
  // read again until nobody is left.
  for (;;) {
    for (const auto& [pid, name] : pids_) kill(pid, SIGKILL);
    for (const int pid : children_of_self()) kill(pid, SIGKILL);
    int status = 0;
    const pid_t pid = waitpid(-1, &status, 0);
    if (pid > 0) pids_.erase(pid);
    if (pid < 0 && errno != EINTR) break;
  }
  pids_.clear();
}

Result<std::string> program_beside(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = (self.parent_path() / name).string();
  if (error || access(path.c_str(), X_OK) != 0) {
    return not_found(path + ": no such program; it belongs beside `remesh`");
  }
  return path;
}

}  // namespace remesh::ctl
