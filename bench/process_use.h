// What a benchmark itself has used: processor time, because other programs
// share the machine, and memory.
#pragma once

#include <cstdint>
#include <ctime>
#include <fstream>
#include <string>

namespace remesh::bench {

// Seconds that this thread has used.
inline double thread_cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Bytes of this process by a name of /proc/self/status, such as "VmHWM"; 0 if
// there is none.
inline uint64_t status_bytes(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(name + ":"))
      return std::stoull(line.substr(name.size() + 1)) * 1024;
  return 0;
}

}  // namespace remesh::bench
