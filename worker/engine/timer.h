// Timer: adds the seconds of a scope to a sum.
#pragma once

#include "proto/base/clock.h"

namespace remesh::engine {

class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() { seconds_ += seconds_since(began_ns_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  const int64_t began_ns_ = monotonic_ns();
};

}  // namespace remesh::engine
