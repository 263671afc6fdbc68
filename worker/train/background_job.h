// BackgroundJob: runs one job at a time in a thread of its own, for work that
// must not delay training, such as writing files. The owner polls or waits for
// the result; there are no callbacks. The destructor waits for the running job.
//
// Threads: one owner thread uses it. A job starts with the owner's priority and
// may lower it.
#pragma once

#include <functional>
#include <future>

#include "proto/base/status.h"

namespace remesh::train {

// Training takes precedence over this thread, and over those that it starts,
// from now on: a thread without privileges cannot raise its priority again. It
// still gets about 3 % of a contended processor.
void lower_priority_of_this_thread();

class BackgroundJob {
 public:
  // An exception of the job, or a thread that cannot be started, is a result:
  // Unavailable. REQUIRES: !busy().
  void start(std::function<Status()> job);
  // Between start() and the return of take().
  bool busy() const { return job_.valid(); }
  // Whether take() returns at once. REQUIRES: busy().
  bool done() const;
  // The result of a job that is done(), without taking it.
  const Status& result() const { return job_.get(); }
  // Waits for the end, calling `tick` every 10 ms, and returns the result.
  // REQUIRES: busy().
  Status take(const std::function<void()>& tick = [] {});

 private:
  std::shared_future<Status> job_;
};

}  // namespace remesh::train
