// Loop: the event loop of every daemon, poll(2) and a tick on one thread.
//
// Handlers run on the thread that calls run(). A handler may add and remove
// handlers, including itself. Signals arrive as events (signalfd), never as
// signal handlers.
//
// A Loop belongs to one thread. Errors of poll(2) other than EINTR are
// programming errors (a watched descriptor was closed) and end the process.
#pragma once

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

  // Calls `handler` when `fd` is readable, at end of file or in error. The
  // caller owns fd and must unwatch it before closing it.
  void watch(int fd, std::function<void()> handler);
  void unwatch(int fd);
  // Called after the handlers of every wake-up, at least every tick_ms.
  void on_tick(std::function<void()> handler);
  // Blocks the signals in this thread (call it before other threads start) and
  // passes them to `handler`, except those that the process ignores, such as
  // SIGHUP under nohup. They remain blocked after the Loop is destroyed;
  // children must reset their mask. REQUIRES: called at most once per Loop.
  Status watch_signals(const std::vector<int>& signals,
                       std::function<void(int)> handler);
  void set_tick_ms(int tick_ms);
  // Runs until stop() is called; returns its code.
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
