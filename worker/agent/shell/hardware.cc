#include "worker/agent/shell/hardware.h"

#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/child.h"
#include "proto/base/descriptor.h"
#include "proto/limits/plausible.h"

namespace remesh::agent {
namespace {

// Others of this host may be measuring before.
constexpr int64_t kTimeoutMs = 30'000;

}  // namespace

HardwareMeasured describe_hardware(const std::string& program) {
  const Descriptor output(memfd_create("hardware", MFD_CLOEXEC));
  if (output.get() < 0)
    return {.error = "no memory for the output of " + program};
  const auto child =
      start_child({.argv = {program, "--core"}, .output_fd = output.get()});
  if (!child.ok()) return {.error = child.status().message()};
  const int status = wait_or_kill(*child, kTimeoutMs);
  std::string text(limits::kMaxHardware, '\0');
  const ssize_t n = pread(output.get(), text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  if (status == -1) return {.error = program + " did not end"};
  if (status != 0 || text.empty())
    return {.error = program + " failed: " + text};
  return {.description = text};
}

}  // namespace remesh::agent
