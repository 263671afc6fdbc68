// DirectiveSender: where the workers are, and what goes to them.
//
// A directive may say only what is on disk. While a write that precedes it is
// not done it is held back, the newest of each worker, and the worker is told
// the directive before it again, every kKeepAliveMs: that one still holds, and
// the worker hears that there is a coordinator.
//
// Threads: the owner's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/server/outbox.h"
#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::server {

class DirectiveSender {
 public:
  static constexpr int64_t kKeepAliveMs = 300;

  // `job` is written on every envelope. The others must outlive this.
  DirectiveSender(wire::Server* server, const Outbox* outbox, std::string job)
      : server_(*server), outbox_(*outbox), job_(std::move(job)) {}

  // The worker is where this report came from. Forgets those that are no
  // members when there are very many.
  void note(const wire::PeerId& peer, const pb::Report& report,
            const std::function<bool(const std::string&)>& is_member);
  // The workers behind a broken connection.
  std::vector<std::string> workers_at(const wire::PeerId& peer) const;

  // Nothing is sent to a worker that has not reported yet.
  void send(const core::SendDirective& directive, int64_t now_ms);
  // At once: its generation runs, so it is in the journal.
  void send(const std::string& worker, const pb::FenceOut& fence);
  // Sends what is due. Call it when something was written, and at every tick.
  void poll(int64_t now_ms);

 private:
  struct Place {
    wire::PeerId peer;
    uint64_t incarnation = 0;
    std::optional<core::SendDirective> sent;  // the newest
    int64_t sent_ms = 0;
    std::optional<core::SendDirective> held;
    uint64_t held_after = 0;  // the write before it
  };

  void release(Place& place, int64_t now_ms);
  void send_again(Place& place, int64_t now_ms);
  void send(const Place& place, pb::Envelope envelope);

  wire::Server& server_;
  const Outbox& outbox_;
  const std::string job_;
  std::map<std::string, Place> places_;  // by worker
  // One sequence for all workers, so that a worker that returns after it was
  // declared dead never sees the numbers go backwards.
  uint64_t seq_ = 0;
};

}  // namespace remesh::server
