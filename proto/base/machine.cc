#include "proto/base/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace remesh {
namespace {

constexpr char kCgroups[] = "/sys/fs/cgroup";

// The cgroups of a process and their parents, whose limits hold too, as folders
// below `root`: of version 2, or of `controller` in version 1. `own`: its
// /proc/PID/cgroup. The folders need not exist.
std::vector<std::string> cgroup_folders(const std::string& own,
                                        const std::string& controller,
                                        const std::string& root) {
  std::vector<std::string> out;
  std::istringstream in(own);
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool v1 =
        ("," + names + ",").find("," + controller + ",") != std::string::npos;
    if (!v1 && !names.empty()) continue;
    std::string top = root;
    if (v1) top.append("/").append(controller);
    for (std::string path = line.substr(second + 1);;
         path.resize(path.rfind('/'))) {
      out.push_back(top + path);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return out;
}

std::string own_cgroups() {
  std::ifstream in("/proc/self/cgroup");
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

// Version 2 has cpu.max ("150000 100000" or "max 100000"), version 1 a file for
// each of the two numbers; a quota of -1 there is no limit.
double cgroup_cpu_limit(const std::string& own, const std::string& root) {
  double least = 0;
  for (const std::string& folder : cgroup_folders(own, "cpu", root)) {
    double quota = 0, period = 0;
    if (!(std::ifstream(folder + "/cpu.max") >> quota >> period)) {
      std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (quota > 0 && period > 0)
      least = least == 0 ? quota / period : std::min(least, quota / period);
  }
  return least;
}

// The kernel refuses a set that is smaller than its own.
std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  for (size_t most = CPU_SETSIZE; most <= size_t{1} << 20; most *= 2) {
    std::vector<cpu_set_t> sets(most / CPU_SETSIZE);
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    for (size_t cpu = 0; cpu < most; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, sets.data()))
        cpus.push_back(static_cast<int>(cpu));
    break;
  }
  return cpus;
}

int usable_cores() {
  const int cores = std::max(1, static_cast<int>(allowed_cpus().size()));
  const double limit = cgroup_cpu_limit(own_cgroups(), kCgroups);
  if (limit <= 0) return cores;
  return std::clamp(static_cast<int>(std::ceil(limit)), 1, cores);
}

bool processor_has_bf16() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

uint64_t cgroup_memory_limit(const std::string& own, const std::string& root) {
  uint64_t least = 0;
  for (const std::string& folder : cgroup_folders(own, "memory", root))
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      std::ifstream in(folder + name);  // "max": no limit
      uint64_t limit = 0;
      if (in >> limit && limit > 0 && (least == 0 || limit < least))
        least = limit;
    }
  return least;
}

uint64_t oom_kills(const std::string& own, const std::string& root,
                   const std::string& vmstat) {
  std::vector<std::string> files;
  for (const std::string& folder : cgroup_folders(own, "memory", root))
    for (const char* name : {"/memory.events", "/memory.oom_control"})
      files.push_back(folder + name);
  files.push_back(vmstat);
  for (const std::string& file : files) {
    std::ifstream in(file);
    uint64_t count = 0;
    for (std::string key; in >> key >> count;)
      if (key == "oom_kill") return count;
  }
  return 0;
}

uint64_t oom_kills() {
  return oom_kills(own_cgroups(), kCgroups, "/proc/vmstat");
}

uint64_t usable_memory() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  const int64_t page = sysconf(_SC_PAGESIZE);
  const auto bytes =
      pages > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page)
                : uint64_t{0};
  const uint64_t limit = cgroup_memory_limit(own_cgroups(), kCgroups);
  return limit > 0 && (bytes == 0 || limit < bytes) ? limit : bytes;
}

}  // namespace remesh
