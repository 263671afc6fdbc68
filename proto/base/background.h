// Background: what another thread finds out, for a thread that must not wait:
// reading a file on storage that hangs takes as long as that does.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

namespace remesh {

// Outlives whoever waits for it. `result` may be read once `done` is true.
template <typename T>
struct Background {
  T result;
  std::atomic<bool> done = false;

  template <typename F>
  static std::shared_ptr<Background> start(F find) {
    auto out = std::make_shared<Background>();
    std::thread([out, find = std::move(find)] {
      out->result = find();
      out->done = true;
    }).detach();
    return out;
  }
};

}  // namespace remesh
