// What people ask of the coordinator: one function for each command.
#include <fmt/format.h>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::core {

pb::Reply Coordinator::answer(const pb::Command& command) {
  pb::Reply reply;
  reply.set_id(command.id());
  const Status done = run_command(command);
  reply.set_ok(done.ok());
  if (!done.ok()) {
    reply.set_error(done.message());
    reply.set_code(code_name(done.code()));
  }
  *reply.mutable_status() = status();
  return reply;
}

pb::JobStatus Coordinator::status() const {
  return reporter_.status({.view = view(),
                           .options = options_,
                           .shape = shape_,
                           .policy = policy_,
                           .ledger = ledger_,
                           .keeps_state = keeps_state_,
                           .waiting_for = waiting_for_,
                           .put_off = put_off_,
                           .events = events_,
                           .dropped = dropped_});
}

Status Coordinator::run_command(const pb::Command& command) {
  RETURN_IF_ERROR(limits::check(command));
  switch (command.kind()) {
    case pb::Command::STATUS:
      return ok_status();
    case pb::Command::DRAIN:
      return drain(command.worker());
    case pb::Command::CHECKPOINT:
      return save_checkpoint();
    case pb::Command::STOP:
      return request_stop(command.discard());
    case pb::Command::MESH:
      return pin_mesh(command.layout());
    case pb::Command::SCALE:
      return set_scale(command.slots());
    case pb::Command::UNCORDON:
      return lift_cordon(command.worker());
    case pb::Command::UNKNOWN:
      break;
  }
  return invalid_argument("the coordinator does not know this command");
}

Status Coordinator::drain(const std::string& worker) {
  const Roster::Member* m = roster_.find_alive(worker);
  if (m == nullptr) {
    std::vector<std::string> names;
    for (const auto& [name, member] : roster_.members())
      if (member.alive) names.push_back(name);
    return not_found(fmt::format("no worker '{}'; the workers are: {}", worker,
                                 names.empty() ? "none" : join(names)));
  }
  if (m->draining) return ok_status();
  // Workers that are gone need not be remembered.
  auto* drained = durable_.mutable_draining();
  for (int i = drained->size() - 1; i >= 0; --i)
    if (!considers_live(drained->Get(i).name(), drained->Get(i).incarnation()))
      drained->DeleteSubrange(i, 1);
  pb::Durable::Member* d = drained->Add();
  d->set_name(worker);
  d->set_incarnation(m->report.incarnation());
  roster_.drain(worker);
  persist();
  emit(events::kDrain, {.worker = worker});
  return ok_status();
}

Status Coordinator::save_checkpoint() {
  if (durable_.phase() != pb::Durable::RUNNING)
    return unavailable(fmt::format("cannot save now: the job is {}",
                                   phase_text(durable_.phase())));
  directives_.request_checkpoint();
  return ok_status();
}

Status Coordinator::request_stop(bool discard) {
  if (durable_.stop_requested() && (durable_.stop_discards() || !discard))
    return ok_status();
  durable_.set_stop_requested(true);
  durable_.set_stop_discards(discard);
  persist();
  EventFields e;
  if (discard) e.detail = "without saving";
  emit(events::kStopRequested, e);
  return ok_status();
}

// The job continues. Whoever asked can make room and ask again.
void Coordinator::decline_stop(const std::string& why) {
  durable_.set_stop_requested(false);
  emit(events::kStopDeclined, {.cause = why});
}

Status Coordinator::check_another_mesh_follows() const {
  if (!terminal(durable_.phase()) && !durable_.stop_requested())
    return ok_status();
  return remesh::ended(fmt::format(
      "the mesh cannot change any more: the job is {}",
      durable_.stop_requested() ? "stopping" : phase_text(durable_.phase())));
}

Status Coordinator::pin_mesh(const std::string& layout) {
  RETURN_IF_ERROR(check_another_mesh_follows());
  pb::MeshRequest* request = durable_.mutable_mesh_request();
  ASSIGN_OR_RETURN(const bool changed, policy_.pin(view(), layout, request));
  if (!changed) return ok_status();
  persist();
  const auto pin = pinned_layout(*request);
  pb::EventRecord e =
      event(events::kMeshAsked, {.detail = pin ? "pinned to " + pin->to_string()
                                               : "automatic mesh selection"});
  if (pin) *e.mutable_mesh() = mesh_of(*pin);
  if (const auto before = mesh_before()) *e.mutable_from() = *before;
  emit(std::move(e));
  return ok_status();
}

Status Coordinator::set_scale(int64_t slots) {
  RETURN_IF_ERROR(check_another_mesh_follows());
  ASSIGN_OR_RETURN(
      const bool changed,
      policy_.scale(view(), slots, durable_.mutable_mesh_request()));
  if (!changed) return ok_status();
  persist();
  emit(events::kScaleAsked,
       {.detail = slots == 0 ? "using all slots"
                             : fmt::format("using {}; others are spares",
                                           plural(slots, "slot"))});
  return ok_status();
}

// `name`: of a host, or of a worker on it.
Status Coordinator::lift_cordon(const std::string& name) {
  Cordoning cordons = cordoning();
  ASSIGN_OR_RETURN(const std::string host, cordons.lift(name));
  persist();
  emit(events::kHostUncordoned, {.host = host, .detail = "`remesh uncordon`"});
  return ok_status();
}

}  // namespace remesh::core
