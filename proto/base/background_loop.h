// BackgroundLoop: a thread that calls one function, when it is woken and at
// intervals that the function chooses.
//
// Threads: wake() may be called by any. The destructor waits for the call in
// progress; a wake() that has not been served by then is dropped.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

namespace remesh {

class BackgroundLoop {
 public:
  using Milliseconds = std::chrono::milliseconds;
  struct Options {
    // Before the first call; without it that waits for wake().
    std::optional<Milliseconds> first = std::nullopt;
    // Between two calls at least, whoever wakes.
    Milliseconds min_gap{0};
  };
  // `work` returns when to call it next: after that time or when woken, or,
  // without a value, when woken.
  using Work = std::function<std::optional<Milliseconds>()>;

  BackgroundLoop(Work work, Options options);
  BackgroundLoop(const BackgroundLoop&) = delete;
  BackgroundLoop& operator=(const BackgroundLoop&) = delete;

  void wake();

 private:
  void run(const std::stop_token& stop);

  const Work work_;
  const Options options_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool woken_ = false;
  std::jthread thread_;  // last: starts when the rest exists
};

}  // namespace remesh
