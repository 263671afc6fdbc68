// Background: one thread that runs one job at a time, for what must not hold up
// training (writing files). Its owner asks for the result; nobody is called
// back. The destructor waits for the job under way.
//
// Threads: one owner thread uses it; jobs run in its own thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "proto/base/status.h"

namespace remesh::train {

// Training goes before this thread, and those it starts, for good: a thread
// without privileges cannot rise again. Of a processor that is wanted elsewhere
// it gets some 3 %.
void lower_priority_of_this_thread();

class Background {
 public:
  enum class Priority { kLow, kOfOwner };
  explicit Background(Priority priority = Priority::kLow)
      : priority_(priority) {}
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Makes the thread, if there is none, with the calling thread's priority or
  // the low one; start() does it else.
  void prepare();
  // Starts `job`. REQUIRES: none is under way, and the last one's result was
  // taken.
  void start(std::function<Status()> job);
  // Between start() and take().
  bool busy() const { return busy_; }
  // The result once the job has ended; stays until taken.
  std::optional<Status> result() const;
  // Waits for the end, calling `tick` every few milliseconds, and takes the
  // result. REQUIRES: busy().
  Status wait(const std::function<void()>& tick);
  // Forgets a result. REQUIRES: result() has one.
  void take();

 private:
  void loop();

  const Priority priority_;
  bool busy_ = false;  // owner's
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<Status()> job_;
  std::optional<Status> result_;
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace remesh::train
