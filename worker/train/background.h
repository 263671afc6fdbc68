// Background: one thread of low priority that runs one job at a time, for what
// must not hold up training (writing files). Its owner asks for the result;
// nobody is called back. The destructor waits for the job under way.
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

class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

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

  bool busy_ = false;  // owner's
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<Status()> job_;
  std::optional<Status> result_;
  bool quit_ = false;
  std::thread thread_;  // started with the first job
};

}  // namespace remesh::train
