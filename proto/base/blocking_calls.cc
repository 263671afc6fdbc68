#include "proto/base/blocking_calls.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace remesh {

using Milliseconds = std::chrono::milliseconds;

struct BlockingCalls::State {
  std::mutex mutex;
  std::condition_variable ended;
  int in_progress = 0;
};

BlockingCalls::BlockingCalls(int64_t grace_ms)
    : grace_ms_(grace_ms), state_(std::make_shared<State>()) {}

BlockingCalls::~BlockingCalls() {
  std::unique_lock lock(state_->mutex);
  state_->ended.wait_for(lock, Milliseconds(grace_ms_),
                         [this] { return state_->in_progress == 0; });
}

bool BlockingCalls::start(Call call) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->in_progress == kMaxInProgress) return false;
    ++state_->in_progress;
  }
  const auto end = [](State& state) {
    const std::lock_guard lock(state.mutex);
    --state.in_progress;
    state.ended.notify_all();
  };
  try {
    std::thread([state = state_, end, call = std::move(call)]() mutable {
      call();
      call = nullptr;  // releases what it owns
      end(*state);
    }).detach();
  } catch (const std::system_error&) {  // no more threads
    end(*state_);
    return false;
  }
  return true;
}

bool BlockingCalls::within(int64_t patience_ms, const Call& call) {
  const auto ended = std::make_shared<std::promise<void>>();
  auto end = ended->get_future();
  const auto is_over = [](const std::future<void>& f, int64_t ms) {
    return f.wait_for(Milliseconds(ms)) == std::future_status::ready;
  };
  if (!start([call, ended] {
        call();
        ended->set_value();
      }))
    return false;
  if (late_.valid() && !is_over(late_, 0)) return false;
  if (is_over(end, patience_ms)) return true;
  late_ = std::move(end);
  return false;
}

}  // namespace remesh
