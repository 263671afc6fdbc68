// Timer: adds the seconds of a scope to a sum.
#pragma once

#include "proto/base/clock.h"

namespace remesh::engine {

class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() {
    seconds_ += static_cast<double>(monotonic_ns() - began_ns_) * 1e-9;
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  const int64_t began_ns_ = monotonic_ns();
};

}  // namespace remesh::engine
