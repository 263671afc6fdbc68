// TimedComm: a Comm that adds up the seconds a rank waits in it. What tensor
// and context parallelism wait for happens inside a stage's passes, where
// nobody else could tell it from computing. A group split from it is not timed.
//
// Borrows the Comm it stands for. Threads: as that one.
#pragma once

#include "worker/engine/timer.h"
#include "worker/trace/observed_comm.h"

namespace remesh::engine {

// Adds to a sum, which must outlive it; for ObservedComm.
class TimeObserver {
 public:
  explicit TimeObserver(double& seconds) : seconds_(&seconds) {}
  bool listens() const { return true; }
  Timer blocking(const trace::CommOp&) const { return Timer(*seconds_); }
  TimeObserver started(const trace::CommOp&) const { return *this; }
  Timer waiting() const { return Timer(*seconds_); }
  void done() const {}

 private:
  double* seconds_;
};

using TimedComm = trace::ObservedComm<TimeObserver>;

}  // namespace remesh::engine
