// What the coordinator tells people.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/survival.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

// The first values of JobStatus.State and WorkerStatus.State.
static_assert(int{pb::JobStatus::WAITING} == int{pb::Durable::WAITING} &&
              int{pb::JobStatus::STOPPED} == int{pb::Durable::STOPPED} &&
              int{pb::WorkerStatus::IDLE} == int{pb::Report::IDLE} &&
              int{pb::WorkerStatus::UNKNOWN} == int{pb::Report::UNKNOWN});

pb::JobStatus::State state_of(pb::Durable::Phase phase) {
  return static_cast<pb::JobStatus::State>(phase);
}

pb::WorkerStatus::State state_of(const Roster::Member& m) {
  if (m.given_up) return pb::WorkerStatus::GIVEN_UP;
  if (!m.alive) return pb::WorkerStatus::DEAD;
  if (!m.reported) return pb::WorkerStatus::AWAITED;
  return static_cast<pb::WorkerStatus::State>(m.report.state());
}

}  // namespace

void Coordinator::fill_worker_status(const std::string& name,
                                     const Roster::Member& m,
                                     pb::WorkerStatus* out) const {
  out->set_name(name);
  out->set_incarnation(m.report.incarnation());
  out->set_host(m.report.host());
  out->set_pid(m.report.pid());
  out->set_slots(m.report.slots());
  out->set_cores(m.report.cores());
  out->set_build(m.report.build());
  out->set_age_s(
      std::max(0.0, static_cast<double>(now_ms_ - m.heard_ms) / 1000));
  out->set_state(state_of(m));
  out->set_draining(m.leaving());
  if (const pb::HostFaults& faults = durable_.host_faults();
      is_cordoned(faults, m.report.host()))
    out->set_cordoned(cordon_reason(faults, m.report.host()));
  for (const pb::RankStatus& s : m.report.ranks()) {
    pb::RankStatus* rank = out->add_ranks();
    *rank = s;
    if (m.report.generation() == durable_.generation()) fill_prediction(rank);
  }
}

void Coordinator::fill_prediction(pb::RankStatus* rank) const {
  const pb::Assignment& a = durable_.assignment();
  if (!shape_ || rank->rank() < 0 || rank->rank() >= a.ranks_size()) return;
  const geometry::Layout layout = layout_of(a.mesh());
  if (!planner::admit(*shape_, layout).ok()) return;  // of an older job file
  if (predicted_generation_ != a.generation()) predicted_.clear();
  predicted_generation_ = a.generation();
  const auto [it, fresh] = predicted_.try_emplace(rank->rank());
  if (fresh)
    to_message(planner::predict_memory(*shape_, layout, rank->rank()),
               &it->second);
  *rank->mutable_predicted() = it->second;
}

// How the job runs on the mesh it has.
void Coordinator::fill_settings(pb::JobStatus* out) const {
  const bool planned = durable_.assignment().ranks_size() > 0;
  const pb::Job& job = planned ? durable_.assignment().job() : options_.job;
  *out->mutable_parallel() = job.parallel();
  out->set_recompute(job.train().recompute());
  out->set_recompute_every(job.train().recompute_every());
  const pb::MeshRequest& asked = durable_.mesh_request();
  if (!asked.pinned().empty()) out->set_pinned(asked.pinned());
  if (asked.scale() > 0) out->set_scale(asked.scale());
  if (durable_.stop_requested()) out->set_stop_requested(true);
  out->set_mesh_changes(!terminal(durable_.phase()) &&
                        (durable_.phase() != pb::Durable::RUNNING ||
                         asked.changed() ||
                         policy_.wanted_change(view(), 0).has_value()));
  if (!shape_ || !planned) return;
  const geometry::Layout layout = layout_of(durable_.assignment().mesh());
  if (planner::admit(*shape_, layout).ok())
    out->set_predicted_bubble(scheduled_bubble(*shape_, layout));
}

// What would be lost with a host now.
void Coordinator::fill_kept_state(pb::JobStatus* out) const {
  const pb::Durable::Phase phase = durable_.phase();
  const int64_t committed = roster_.committed_step(durable_);
  if (!keeps_state() || committed < 0 ||
      (phase != pb::Durable::RUNNING && phase != pb::Durable::FINISHING))
    return;
  const pb::Assignment& a = durable_.assignment();
  const int64_t every =
      makes_replicas(a) ? a.job().elastic().replicate_every() : 0;
  pb::JobStatus::KeptState* kept = out->mutable_kept_state();
  kept->set_step(committed);
  kept->set_replicate_every(every);
  for (const std::string& host : needed_hosts(a)) kept->add_needed_hosts(host);
  if (!kept->needed_hosts().empty()) return;
  // With every > 1 the replicas of a step are complete when the next one is.
  const int64_t before = committed - 1;
  kept->set_safe_step(every > 1
                          ? std::max(a.source().step(), before - before % every)
                          : committed);
}

pb::JobStatus Coordinator::status() const {
  pb::JobStatus s;
  s.set_job(options_.job.job().name());
  s.set_state(state_of(durable_.phase()));
  switch (durable_.phase()) {
    case pb::Durable::WAITING:
      s.set_detail(waiting_for_);
      s.set_missing_slots(static_cast<int>(policy_.missing_slots(view())));
      break;
    case pb::Durable::RUNNING:
      s.set_detail(put_off_.empty() ? failure_of(durable_.cause()).text()
                                    : "change of mesh put off: " + put_off_);
      break;
    case pb::Durable::FINISHING:
      s.set_detail(durable_.finish().reason());
      break;
    default:
      s.set_detail(failure_of(durable_.cause()).text());
      break;
  }
  if (const std::string awaited = roster_.awaited_text(durable_, now_ms_);
      !awaited.empty())
    s.set_detail(s.detail().empty() ? awaited : s.detail() + "; " + awaited);
  s.set_generation(durable_.generation());
  if (durable_.assignment().ranks_size() > 0)
    *s.mutable_mesh() = durable_.assignment().mesh();
  if (durable_.assignment().has_prediction())
    s.set_prediction(durable_.assignment().prediction());
  s.set_coordinator_host(options_.host);
  s.set_coordinator_pid(options_.pid);
  s.set_epoch(durable_.epoch());
  s.set_run_dir(options_.run_dir);
  s.set_address(options_.address);
  s.set_no_auth(options_.no_auth);
  s.set_step(ledger_.last_finished());
  s.set_steps(total_steps());
  if (const auto* last = ledger_.last_metrics()) *s.mutable_last() = *last;
  s.set_checkpoint_step(std::max<int64_t>(0, checkpoints_.newest_step()));
  int slots = 0;
  for (const auto& [name, m] : roster_.members()) {
    fill_worker_status(name, m, s.add_workers());
    if (m.alive && !is_cordoned(durable_.host_faults(), m.report.host()))
      slots += m.report.slots();
  }
  s.set_spares(std::max(0, slots - durable_.assignment().ranks_size()));
  fill_settings(&s);
  fill_kept_state(&s);
  for (const pb::Cordon& c : durable_.host_faults().cordons()) {
    *s.add_cordons() = c;
    s.mutable_cordons()->rbegin()->set_remaining_s(remaining_s(c, unix_now()));
  }
  for (const pb::EventRecord& e : events_) *s.add_events() = e;
  s.set_dropped(dropped_);
  return s;
}

}  // namespace remesh::core
