// Loop: poll + tick on one thread; how every daemon waits.
//
// Handlers run on the thread that calls run(). A handler may add and remove
// others. Signals arrive as events (signalfd), never as handlers on a random
// stack.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "proto/base/status.h"

namespace remesh::wire {

class Loop {
 public:
  // `tick_ms`: the longest time between two calls of the tick handler.
  explicit Loop(int tick_ms);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Calls `handler` when `fd` is readable. The caller keeps owning fd.
  void watch(int fd, std::function<void()> handler);
  void unwatch(int fd);
  // Called after every wake-up and at least every tick_ms, after the fds.
  void on_tick(std::function<void()> handler);
  // Blocks the signals in this thread (call before other threads start) and
  // delivers them here.
  Status watch_signals(const std::vector<int>& signals,
                       std::function<void(int)> handler);
  void set_tick_ms(int tick_ms);
  // Until stop() is called; returns stop's code.
  int run();
  void stop(int code);

 private:
  int tick_ms_;
  int signal_fd_ = -1;
  bool stopped_ = false;
  int code_ = 0;
  std::map<int, std::function<void()>> handlers_;
  std::function<void()> tick_;
  std::function<void(int)> signal_handler_;
};

}  // namespace remesh::wire
