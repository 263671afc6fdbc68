#include "coordinator/core/commands.h"

#include <fmt/format.h>

#include "coordinator/core/announcements.h"
#include "coordinator/core/drains.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

using Event = std::optional<pb::EventRecord>;

Result<Event> drain(const std::string& worker, const CommandInputs& in) {
  const Roster::Member* m = in.roster->find_alive(worker);
  if (m == nullptr) {
    std::vector<std::string> names;
    for (const auto& [name, member] : in.roster->members())
      if (member.alive) names.push_back(name);
    return not_found(fmt::format("no worker '{}'; the workers are: {}", worker,
                                 names.empty() ? "none" : join(names)));
  }
  if (m->draining) return Event();
  begin_drain(worker, m->report.incarnation(), *in.roster, in.drains);
  in.roster->drain(worker);
  return Event(event(events::kDrain, {.worker = worker}));
}

Result<Event> save_checkpoint(const CommandInputs& in) {
  const pb::Durable::Phase phase = in.view.durable.phase();
  if (phase != pb::Durable::RUNNING)
    return unavailable(
        fmt::format("cannot save now: the job is {}", phase_text(phase)));
  in.directives->request_checkpoint();
  return Event();
}

Result<Event> stop(bool discard, pb::StopRequest* request) {
  if (request->asked() && (request->discards() || !discard)) return Event();
  request->set_asked(true);
  request->set_discards(discard);
  EventFields e;
  if (discard) e.detail = "without saving";
  return Event(event(events::kStopRequested, e));
}

Status check_another_mesh_follows(const pb::Durable& durable) {
  const bool stops = durable.stop().asked();
  if (!terminal(durable.phase()) && !stops) return ok_status();
  return remesh::ended(
      fmt::format("the mesh cannot change any more: the job is {}",
                  stops ? "stopping" : phase_text(durable.phase())));
}

Result<Event> pin_mesh(const std::string& layout, const CommandInputs& in) {
  RETURN_IF_ERROR(check_another_mesh_follows(in.view.durable));
  ASSIGN_OR_RETURN(const bool changed,
                   in.policy.pin(in.view, layout, in.mesh_request));
  if (!changed) return Event();
  const auto pin = pinned_layout(*in.mesh_request);
  pb::EventRecord e =
      event(events::kMeshAsked, {.detail = pin ? "pinned to " + pin->to_string()
                                               : "automatic mesh selection"});
  if (pin) *e.mutable_mesh() = mesh_of(*pin);
  if (in.mesh) *e.mutable_from() = *in.mesh;
  return Event(std::move(e));
}

Result<Event> set_scale(int64_t slots, const CommandInputs& in) {
  RETURN_IF_ERROR(check_another_mesh_follows(in.view.durable));
  ASSIGN_OR_RETURN(const bool changed,
                   in.policy.scale(in.view, slots, in.mesh_request));
  if (!changed) return Event();
  return Event(
      event(events::kScaleAsked,
            {.detail = slots == 0 ? "using all slots"
                                  : fmt::format("using {}; others are spares",
                                                plural(slots, "slot"))}));
}

Result<Event> lift_cordon(const std::string& name, Cordoning* cordons) {
  ASSIGN_OR_RETURN(const Site site, cordons->lift(name));
  EventFields e{.host = site.host, .detail = "`remesh uncordon`"};
  if (!site.worker.empty()) e.worker = site.worker;
  return Event(event(events::kHostUncordoned, e));
}

}  // namespace

pb::EventRecord decline_stop(const std::string& why, pb::StopRequest* request) {
  request->set_asked(false);
  return event(events::kStopDeclined, {.cause = why});
}

Result<std::optional<pb::EventRecord>> carry_out(const pb::Command& command,
                                                 const CommandInputs& in) {
  RETURN_IF_ERROR(limits::check(command));
  switch (command.kind()) {
    case pb::Command::STATUS:
      return Event();
    case pb::Command::DRAIN:
      return drain(command.worker(), in);
    case pb::Command::CHECKPOINT:
      return save_checkpoint(in);
    case pb::Command::STOP:
      return stop(command.discard(), in.stop);
    case pb::Command::MESH:
      return pin_mesh(command.layout(), in);
    case pb::Command::SCALE:
      return set_scale(command.slots(), in);
    case pb::Command::UNCORDON:
      return lift_cordon(command.worker(), in.cordons);
    case pb::Command::UNKNOWN:
      break;
  }
  return invalid_argument("the coordinator does not know this command");
}

pb::Reply reply_to(const pb::Command& command, const Status& done,
                   pb::JobStatus status) {
  pb::Reply reply;
  reply.set_id(command.id());
  reply.set_ok(done.ok());
  if (!done.ok()) {
    reply.set_error(done.message());
    reply.set_code(code_name(done.code()));
  }
  *reply.mutable_status() = std::move(status);
  return reply;
}

Event release_unfit_pin(const ClusterView& view, const MeshPolicy& policy,
                        pb::MeshRequest* request) {
  const auto pin = pinned_layout(*request);
  if (view.durable.phase() != pb::Durable::RUNNING || !pin ||
      layout_of(view.durable.assignment().mesh()) == *pin ||
      policy.place(view, *pin).ok())
    return std::nullopt;
  request->clear_pinned();
  request->clear_changed();
  return pin_released_event(*pin);
}

Event release_other_pin(const geometry::Layout& mesh,
                        pb::MeshRequest* request) {
  request->clear_changed();
  const auto pin = pinned_layout(*request);
  if (!pin || *pin == mesh) return std::nullopt;
  request->clear_pinned();
  return pin_released_event(*pin);
}

Event release_scale(const std::string& why, pb::MeshRequest* request) {
  if (request->scale() <= 0) return std::nullopt;
  request->clear_scale();
  return event(events::kScaleReleased,
               {.detail = fmt::format("using all slots again: {}", why)});
}

}  // namespace remesh::core
