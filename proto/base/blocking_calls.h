// BlockingCalls: runs calls that may block for any time, such as those on
// storage shared with other hosts, in threads of their own.
//
// A call must own what it uses, since it may outlive this object, which belongs
// to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>

namespace remesh {

class BlockingCalls {
 public:
  using Call = std::function<void()>;
  static constexpr int kMaxInProgress = 64;

  // The destructor waits up to `grace_ms` for the calls in progress, then
  // leaves them to themselves.
  explicit BlockingCalls(int64_t grace_ms);
  ~BlockingCalls();
  BlockingCalls(const BlockingCalls&) = delete;
  BlockingCalls& operator=(const BlockingCalls&) = delete;

  // False, and the call is dropped, while kMaxInProgress are in progress.
  bool start(Call call);
  // Starts it. Whether it has ended after `patience_ms` at most; as long as one
  // that had not is in progress, no other one is waited for.
  bool within(int64_t patience_ms, const Call& call);

 private:
  struct State;
  const int64_t grace_ms_;
  const std::shared_ptr<State> state_;
  std::future<void> late_;
};

}  // namespace remesh
