#include "worker/agent/shell/hardware.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "proto/base/child.h"
#include "proto/limits/plausible.h"

namespace remesh::agent {
namespace {

// Others of this host may be measuring before.
constexpr int64_t kTimeoutMs = 30'000;

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
  const auto child =
      start_child({.argv = {program, "--core"}, .output_fd = fd});
  std::string out;
  if (!child.ok()) {
    out = "# " + child.status().message();
  } else {
    const int status = wait_or_kill(*child, kTimeoutMs);
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
