// Background: what another thread finds out, for a thread that must not wait:
// reading a file on storage that hangs takes as long as that does.
#pragma once

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace remesh {

// Outlives whoever waits for it. `result` may be read once `done` is true.
// Without a thread to start it is found out at once.
template <typename T>
struct Background {
  T result;
  std::atomic<bool> done = false;

  template <typename F>
  static std::shared_ptr<Background> start(F find) {
    auto out = std::make_shared<Background>();
    const auto run = [out, find = std::move(find)] {
      out->result = find();
      out->done = true;
    };
    try {
      std::thread(run).detach();
    } catch (const std::system_error&) {
      run();
    }
    return out;
  }
};

}  // namespace remesh
