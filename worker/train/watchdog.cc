#include "worker/train/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "proto/base/clock.h"

namespace remesh::train {
namespace {
constexpr int64_t kLimitMs = 60'000;
constexpr std::chrono::milliseconds kPeriod(1000);
constexpr int64_t kPauseMs = 10'000;
}  // namespace

bool OrphanRule::on_sample(int64_t now_ms, int64_t beat_ms, uint64_t progress) {
  if (sampled_ms_ > 0 && now_ms - sampled_ms_ > kPauseMs)
    started_ms_ = moved_ms_ = now_ms;
  sampled_ms_ = now_ms;
  if (progress != progress_) {
    progress_ = progress;
    moved_ms_ = now_ms;
  }
  const int64_t heard_ms = std::max(beat_ms, started_ms_);
  return now_ms - heard_ms > limit_ms_ && now_ms - moved_ms_ > limit_ms_;
}

OrphanGuard::OrphanGuard(const board::Board& board,
                         std::function<void()> on_orphan)
    : board_(board),
      on_orphan_(std::move(on_orphan)),
      rule_(monotonic_ms(), kLimitMs),
      loop_(
          [this] {
            if (rule_.on_sample(monotonic_ms(), board_.daemon_beat_ms(),
                                board_.progress()))
              on_orphan_();
            return kPeriod;
          },
          {.first = kPeriod}) {}

}  // namespace remesh::train
