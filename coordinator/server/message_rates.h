// MessageRates: which messages are within the rates that their senders may send
// at: each connection, and all of one key and host together, which may send few
// commands. A value without I/O.
#pragma once

#include <cstdint>

#include "coordinator/core/rate_limit.h"
#include "proto/wire/channel.h"

namespace remesh::server {

// A second. A worker reports at most 200 times (worker/agent/core), and sends a
// fence a few times; several may be on one host.
inline constexpr double kMessagesPerS = 1000;
inline constexpr double kMessagesPerSOfSource = 4000;
// The answer to a command is a status, which takes long to make for a large
// job.
inline constexpr double kCommandsPerSOfSource = 50;

class MessageRates {
 public:
  // Does not look at the envelope.
  bool admits(const wire::Received& r, int64_t now_ms) {
    return connections_.admits(r.peer, now_ms) &&
           sources_.admits(r.source, now_ms);
  }
  // Of those admitted.
  bool serves(const wire::Received& r, int64_t now_ms) {
    // Who waits for the end is only noted.
    return !r.envelope.has_command() || r.envelope.command().at_end() ||
           commands_.admits(r.source, now_ms);
  }
  // The peer's connection has ended.
  void forget(const wire::PeerId& peer) { connections_.forget(peer); }
  uint64_t over_rate() const {
    return connections_.over_rate() + sources_.over_rate() +
           commands_.over_rate();
  }

  // Whether it is time to tell how many messages were dropped, `others` for
  // other reasons: when there are more, and at most once a minute.
  bool should_tell(uint64_t others, int64_t now_ms) {
    constexpr int64_t kEveryMs = 60'000;
    const uint64_t dropped = others + over_rate();
    if (dropped == announced_ ||
        (announced_ > 0 && now_ms - announced_ms_ < kEveryMs))
      return false;
    announced_ = dropped;
    announced_ms_ = now_ms;
    return true;
  }

 private:
  core::RateLimit connections_{kMessagesPerS, 2 * kMessagesPerS};
  core::RateLimit sources_{kMessagesPerSOfSource, 2 * kMessagesPerSOfSource};
  core::RateLimit commands_{kCommandsPerSOfSource, 2 * kCommandsPerSOfSource};
  uint64_t announced_ = 0;
  int64_t announced_ms_ = 0;
};

}  // namespace remesh::server
