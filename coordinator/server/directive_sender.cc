#include "coordinator/server/directive_sender.h"

#include <utility>

#include "proto/limits/plausible.h"

namespace remesh::server {

void DirectiveSender::note(
    const wire::PeerId& peer, const pb::Report& report,
    const std::function<bool(const std::string&)>& is_member) {
  if (places_.size() >= limits::kMaxWorkers)
    std::erase_if(places_, [&](const auto& p) { return !is_member(p.first); });
  Place& place = places_[report.worker()];
  if (report.incarnation() != place.incarnation) place = {};
  place.peer = peer;
  place.incarnation = report.incarnation();
}

std::vector<std::string> DirectiveSender::workers_at(
    const wire::PeerId& peer) const {
  std::vector<std::string> out;
  for (const auto& [name, place] : places_)
    if (place.peer == peer) out.push_back(name);
  return out;
}

void DirectiveSender::send(const core::SendDirective& directive,
                           int64_t now_ms) {
  const auto found = places_.find(directive.directive.worker());
  if (found == places_.end()) return;
  Place& place = found->second;
  place.held = directive;
  place.held_after = outbox_.newest();
  release(place, now_ms);
}

void DirectiveSender::send(const std::string& worker,
                           const pb::FenceOut& fence) {
  const auto place = places_.find(worker);
  if (place == places_.end()) return;
  pb::Envelope out;
  *out.mutable_fence_out() = fence;
  send(place->second, std::move(out));
}

void DirectiveSender::poll(int64_t now_ms) {
  for (auto& [worker, place] : places_) {
    release(place, now_ms);
    if (place.held && place.sent && now_ms - place.sent_ms >= kKeepAliveMs)
      send_again(place, now_ms);
  }
}

void DirectiveSender::release(Place& place, int64_t now_ms) {
  if (!place.held || !outbox_.written(place.held_after)) return;
  place.sent = std::exchange(place.held, std::nullopt);
  send_again(place, now_ms);
}

void DirectiveSender::send_again(Place& place, int64_t now_ms) {
  place.sent->directive.set_seq(++seq_);
  place.sent_ms = now_ms;
  pb::Envelope out;
  *out.mutable_directive() = place.sent->with_assignment();
  send(place, std::move(out));
}

void DirectiveSender::send(const Place& place, pb::Envelope envelope) {
  envelope.set_job(job_);
  // The core repeats messages, so a failure to send does not matter.
  server_.send(place.peer, envelope);
}

}  // namespace remesh::server
