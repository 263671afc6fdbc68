// Clocks, for shells and daemons. Code that decides takes the time as an
// argument instead. Monotonic time is for intervals and timeouts, unix time for
// files that people read.
#pragma once

#include <cstdint>

namespace remesh {

// Nanoseconds of CLOCK_MONOTONIC; comparable among processes of one host.
int64_t monotonic_ns();
inline int64_t monotonic_ms() { return monotonic_ns() / 1'000'000; }
inline double seconds_since(int64_t began_ns) {
  return static_cast<double>(monotonic_ns() - began_ns) * 1e-9;
}
// Seconds since 1970, with microsecond resolution.
double unix_seconds();

}  // namespace remesh
