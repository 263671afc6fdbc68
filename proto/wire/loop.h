// Loop: poll + tick on one thread; how every daemon waits.
//
// Handlers run on the thread that calls run(). A handler may add and remove
// others, and itself. Signals arrive as events (signalfd), never as handlers
// on a random stack.
//
// A Loop belongs to one thread. Errors of poll(2) other than EINTR are a
// programmer's (a watched descriptor was closed) and end the process.
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

  // Calls `handler` when `fd` is readable, at its end or in error. The caller
  // keeps owning fd, and unwatches it before closing it.
  void watch(int fd, std::function<void()> handler);
  void unwatch(int fd);
  // Called after every wake-up and at least every tick_ms, after the fds.
  void on_tick(std::function<void()> handler);
  // Blocks the signals in this thread (call before other threads start) and
  // delivers them here. They stay blocked when the Loop is gone: children must
  // reset their mask. REQUIRES: not called before on this Loop.
  Status watch_signals(const std::vector<int>& signals,
                       std::function<void(int)> handler);
  void set_tick_ms(int tick_ms);
  // Until stop() is called; returns stop's code.
  int run();
  void stop(int code);

 private:
  using Handler = std::shared_ptr<std::function<void()>>;
  void poll_once();
  void read_signals();

  int tick_ms_;
  int signal_fd_ = -1;
  bool stopped_ = false;
  int code_ = 0;
  std::map<int, Handler> handlers_;
  std::function<void()> tick_;
  std::function<void(int)> signal_handler_;
};

}  // namespace remesh::wire
