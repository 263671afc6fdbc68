// Processor time, because other programs share the machine.
#pragma once

#include <ctime>

namespace remesh::bench {

// Seconds that this thread has used.
inline double thread_cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

}  // namespace remesh::bench
