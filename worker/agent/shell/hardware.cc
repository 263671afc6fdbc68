#include "worker/agent/shell/hardware.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "proto/base/clock.h"
#include "proto/limits/plausible.h"
#include "worker/agent/shell/process.h"
#include "worker/agent/shell/rank_env.h"

namespace remesh::agent {
namespace {

// Others of this host may be measuring before.
constexpr int64_t kTimeoutMs = 30'000;

// Its wait status; -1 if it was killed after the timeout.
int wait_for(const Child& child) {
  const int64_t began = monotonic_ms();
  constexpr auto kPoll = std::chrono::milliseconds(20);
  int status = 0;
  while (waitpid(child.pid, &status, WNOHANG) == 0) {
    if (monotonic_ms() - began > kTimeoutMs) {
      kill(child.pid, SIGKILL);
      waitpid(child.pid, &status, 0);
      return -1;
    }
    std::this_thread::sleep_for(kPoll);
  }
  return status;
}

std::string content_of(int fd) {
  std::string text(limits::kMaxHardware, '\0');
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return text;
}

}  // namespace

std::string describe_hardware(const std::string& program) {
  const int fd = memfd_create("hardware", MFD_CLOEXEC);
  if (fd < 0) return "# no memory for the output of " + program;
  const auto child = start_child(
      {.argv = {program, "--core"}, .env = own_environment(), .output_fd = fd});
  std::string out;
  if (!child.ok()) {
    out = "# " + child.status().message();
  } else {
    const int status = wait_for(*child);
    if (child->pidfd >= 0) close(child->pidfd);
    out = content_of(fd);
    if (status == -1)
      out = "# " + program + " did not end";
    else if (status != 0 || out.empty())
      out = "# " + program + " failed: " + out;
  }
  close(fd);
  out.resize(std::min(out.size(), limits::kMaxHardware));
  return out;
}

}  // namespace remesh::agent
