#include "coordinator/core/announcements.h"

#include <fmt/format.h>

#include <utility>

#include "checkpoint/memory/state_info.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/failure_detector.h"
#include "coordinator/core/link_search.h"
#include "coordinator/core/recovery.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

std::string again_text(int64_t wait_ms) {
  return "; trying again in " +
         format_duration(static_cast<double>(wait_ms) / 1000);
}

}  // namespace

pb::EventRecord event(const events::EventKind& kind,
                      const EventFields& fields) {
  pb::EventRecord e;
  e.set_event(kind.name);
  if (fields.worker) e.set_worker(*fields.worker);
  if (fields.host) e.set_host(*fields.host);
  if (fields.cause) e.set_cause(*fields.cause);
  if (fields.detail) e.set_detail(*fields.detail);
  return e;
}

pb::EventRecord event_of(const Roster::MembershipChange& c,
                         const pb::Durable& d) {
  using Kind = Roster::MembershipChange::Kind;
  switch (c.kind) {
    case Kind::kLost: {
      const bool has_part = participates(d, c.worker, c.incarnation) &&
                            has_ranks(d, c.worker) &&
                            d.phase() != pb::Durable::WAITING;
      if (c.leaving && !has_part)
        return event(events::kWorkerLeft, {.worker = c.worker});
      return event(events::kWorkerLost,
                   {.worker = c.worker, .cause = c.detail});
    }
    case Kind::kJoined:
      return event(events::kWorkerJoined,
                   {.worker = c.worker, .detail = c.detail});
    case Kind::kReturned:
      return event(events::kWorkerBack,
                   {.worker = c.worker, .detail = c.detail});
    case Kind::kLeaving:
      return event(events::kWorkerLeaving, {.worker = c.worker});
    case Kind::kCutOff:
      return event(events::kCutOff, {.detail = c.detail});
    case Kind::kReconnected:
      return event(events::kCutOffEnded, {.detail = c.detail});
  }
  return {};
}

pb::EventRecord event_of(const pb::Cause& failure, const ClusterView& view,
                         double seconds) {
  pb::EventRecord e = event(
      events::kFailure, {.worker = failure.worker(), .cause = failure.what()});
  if (failure.rank() >= 0) e.set_rank(failure.rank());
  for (const RankView& r : rank_views(view))
    if (r.status->rank() == failure.rank() && r.worker == failure.worker())
      fill_failure(r, &e);
  for (const pb::Durable::Member& p : view.durable.participants())
    if (p.name() == failure.worker() && !e.has_host()) e.set_host(p.host());
  e.set_seconds(seconds);
  return e;
}

std::vector<pb::EventRecord> start_events(const Options& options,
                                          const pb::Durable& durable,
                                          size_t members) {
  const auto& before = options.restored;
  EventFields e;
  if (before && members > 0)
    e.detail = fmt::format("waiting for the {} of generation {}",
                           plural(static_cast<int64_t>(members), "worker"),
                           durable.generation());
  std::vector<pb::EventRecord> out = {event(
      before ? events::kCoordinatorRestarted : events::kCoordinatorStarted, e)};
  if (before && before->generation() < durable.generation())
    out.push_back(journal_behind_event(durable.generation()));
  if (options.damaged_lines > 0)
    out.push_back(event(
        events::kMetricsDamaged,
        {.detail = fmt::format("metrics.jsonl has {} that are not metrics; "
                               "they stay where they are",
                               plural(options.damaged_lines, "line"))}));
  return out;
}

pb::EventRecord mesh_event(const pb::Assignment& next,
                           const std::optional<pb::Mesh>& before,
                           int64_t last_finished, const std::string& why) {
  pb::EventRecord e =
      event(events::kMesh, {.detail = why + "; " + next.source().reason()});
  *e.mutable_mesh() = next.mesh();
  if (before) *e.mutable_from() = *before;
  e.set_source(source_text(next.source()));
  e.set_source_kind(next.source().kind());
  // A state in memory may have steps that are not finished yet.
  const int64_t step = next.source().step();
  e.set_step(std::max(last_finished, step));
  e.set_lost_steps(std::max<int64_t>(0, last_finished - step));
  return e;
}

pb::EventRecord training_event(const ClusterView& view, int64_t step,
                               const StepTimes::Pause& before) {
  const pb::Durable& d = view.durable;
  pb::EventRecord e = event(events::kTraining);
  e.set_step(step);
  *e.mutable_mesh() = d.assignment().mesh();
  e.set_seconds(before.seconds);
  e.set_lost_steps(before.lost_steps);
  if (const auto digest = view.roster.restored_digest(d.generation()))
    e.set_digest(*digest);
  return e;
}

pb::EventRecord end_event(pb::Durable::Phase phase, const std::string& why,
                          const std::string& unreached,
                          const std::string& only_in_memory) {
  EventFields e;
  if (!why.empty()) e.cause = why;
  if (phase == pb::Durable::DONE) return event(events::kJobDone, e);
  std::vector<std::string> details;
  for (const std::string& d : {unreached, only_in_memory})
    if (!d.empty()) details.push_back(d);
  if (!details.empty()) e.detail = join(details, "; ");
  pb::EventRecord end = event(
      phase == pb::Durable::FAILED ? events::kJobFailed : events::kJobStopped,
      e);
  if (!only_in_memory.empty()) end.set_seconds(memory::kStateKeptS);
  return end;
}

std::string too_few_steps(int64_t given, int64_t done,
                          const std::string& where) {
  return fmt::format(
      "train.steps = {}, but step {} is finished{}; give more steps, for "
      "example --set train.steps={}",
      given, done, where.empty() ? "" : " (" + where + ")", 2 * done);
}

pb::EventRecord event_of(const CheckpointWatch::Result& r) {
  if (r.error.empty()) {
    pb::EventRecord e = event(events::kCheckpoint);
    e.set_step(r.step);
    return e;
  }
  pb::EventRecord e =
      event(events::kCheckpointFailed, {.worker = r.worker, .cause = r.error});
  e.set_rank(r.rank);
  return e;
}

pb::EventRecord event_of(const pb::Cordon& c, double unix_s) {
  const double seconds = remaining_s(c, unix_s);
  const std::string why =
      !c.peer().empty()     ? "its link to " + c.peer() + " seems to be bad; "
      : !c.worker().empty() ? "other workers of the host have not failed; "
                            : "";
  pb::EventRecord e = event(
      events::kHostCordoned,
      {.host = c.host(),
       .cause = c.reason(),
       .detail = fmt::format("{}no ranks are placed on it for {}; `remesh "
                             "uncordon {}` ends this",
                             why, format_duration(seconds),
                             c.worker().empty() ? c.host() : c.worker())});
  if (!c.worker().empty()) e.set_worker(c.worker());
  e.set_seconds(seconds);
  return e;
}

pb::EventRecord event_of(const pb::LinkSearch& test) {
  return event(
      events::kLinkSearch,
      {.cause = test.reason(),
       .detail = fmt::format(
           "messages are lost {}; the next mesh is without {}", link_text(test),
           join({test.apart().begin(), test.apart().end()}))});
}

std::vector<pb::EventRecord> events_of(const Cordoning::Changes& changes,
                                       double unix_s) {
  std::vector<pb::EventRecord> out;
  for (const pb::LinkSearch& test : changes.tests)
    out.push_back(event_of(test));
  if (changes.search_ended)
    out.push_back(event(events::kLinkSearch,
                        {.detail = "given up; all hosts are used again"}));
  for (const pb::Cordon& c : changes.begun) out.push_back(event_of(c, unix_s));
  for (const pb::Cordon& c : changes.ended) {
    const bool needed = remaining_s(c, unix_s) > 0;
    out.push_back(
        event(events::kHostUncordoned,
              {.host = c.host(),
               .detail = needed ? "no mesh is possible without it at present"
                                : "it is tried again"}));
    if (!c.worker().empty()) out.back().set_worker(c.worker());
  }
  return out;
}

pb::EventRecord gap_event(const StepLedger::Entry& gap) {
  pb::EventRecord e = event(
      events::kMetricsGap,
      {.detail = fmt::format("the metrics of the finished steps {} to {} are "
                             "lost",
                             gap.gap_first, gap.gap_last)});
  e.set_step(gap.gap_first - 1);
  return e;
}

pb::EventRecord skipped_event(const pb::StepMetrics& step) {
  pb::EventRecord e = event(
      events::kStepSkipped,
      {.cause = fmt::format("the loss is {:.4g} and the gradient norm {:.4g}",
                            step.loss(), step.grad_norm())});
  e.set_step(step.step());
  return e;
}

pb::EventRecord journal_behind_event(int64_t generation,
                                     std::optional<std::string> worker) {
  return event(events::kJournalBehind,
               {.worker = std::move(worker),
                .detail = fmt::format("generation {} was used before; "
                                      "numbering continues above it",
                                      generation)});
}

pb::EventRecord event_of(const Gathering::Wait& wait) {
  const bool for_mesh = wait.reason == pb::JobStatus::WORKERS;
  const bool for_state = wait.reason == pb::JobStatus::FINISHED_STEPS;
  const bool for_inputs = wait.reason == pb::JobStatus::INPUTS;
  return event(for_mesh     ? events::kWaiting
               : for_state  ? events::kWaitingForState
               : for_inputs ? events::kWaitingForInputs
                            : events::kWaitingForRoom,
               {.detail = wait.text});
}

pb::EventRecord pin_released_event(const geometry::Layout& layout) {
  return event(events::kMeshReleased,
               {.detail = fmt::format("not enough slots for {}; falling back "
                                      "to automatic mesh selection",
                                      layout.to_string())});
}

Gathering::Wait no_inputs(const pb::Durable& d, int64_t wait_ms) {
  return {pb::JobStatus::INPUTS, text_of(d.cause()) + again_text(wait_ms)};
}

Gathering::Wait unsaved_end(const StepLedger& ledger,
                            const CheckpointWatch& checkpoints,
                            const std::string& why, int64_t wait_ms) {
  const std::string& error = checkpoints.last_error();
  return {pb::JobStatus::ROOM_TO_SAVE,
          fmt::format("step {} is not saved: {}{}", ledger.last_finished(),
                      error.empty() ? why : error, again_text(wait_ms))};
}

std::string unsaved_text(int64_t step) {
  return fmt::format(
      "step {} is in no checkpoint; before the job stops, it waits for the "
      "workers that hold this step",
      step);
}

}  // namespace remesh::core
