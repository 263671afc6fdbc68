#include "worker/agent/shell/hardware.h"

#include <sys/mman.h>
#include <unistd.h>

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

HardwareMeasured describe_hardware(const std::string& program) {
  const int fd = memfd_create("hardware", MFD_CLOEXEC);
  if (fd < 0) return {.error = "no memory for the output of " + program};
  const auto child =
      start_child({.argv = {program, "--core"}, .output_fd = fd});
  HardwareMeasured out;
  if (!child.ok()) {
    out.error = child.status().message();
  } else {
    const int status = wait_or_kill(*child, kTimeoutMs);
    const std::string text = content_of(fd);
    if (status == -1)
      out.error = program + " did not end";
    else if (status != 0 || text.empty())
      out.error = program + " failed: " + text;
    else
      out.description = text;
  }
  close(fd);
  return out;
}

}  // namespace remesh::agent
