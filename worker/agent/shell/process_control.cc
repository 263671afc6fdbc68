#include "worker/agent/shell/process_control.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "proto/base/process.h"

namespace remesh::agent {
namespace {

bool same_process_lives(const ProcessId& p) {
  const auto stat = read_proc_stat(p.pid);
  return stat && stat->start_time == p.start_time && stat->state != 'Z' &&
         stat->state != 'X';
}

}  // namespace

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
  (void)close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  execv(program.c_str(), exec_arguments(words).data());
  return io_error(program + ": " + std::strerror(errno));
}

}  // namespace remesh::agent
