#include "coordinator/core/job_status.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/cause.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/survival.h"

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

std::string detail_of(const StatusReporter::Inputs& in) {
  const pb::Durable& d = in.view.durable;
  switch (d.phase()) {
    case pb::Durable::WAITING:
      return in.waiting_for.text;
    case pb::Durable::FINISHING:
      return d.finish().reason();
    case pb::Durable::RUNNING:
      return in.put_off.empty() ? "" : "change of mesh put off: " + in.put_off;
    case pb::Durable::PREPARING:
      return "";
    default:
      return text_of(d.cause());
  }
}

// How the job runs on the mesh it has.
void fill_settings(const StatusReporter::Inputs& in, pb::JobStatus* out) {
  const pb::Durable& d = in.view.durable;
  const bool planned = d.assignment().ranks_size() > 0;
  const pb::Job& job = planned ? d.assignment().job() : in.options.job;
  *out->mutable_parallel() = job.parallel();
  out->set_recompute(job.train().recompute());
  out->set_recompute_every(job.train().recompute_every());
  const pb::MeshRequest& asked = d.mesh_request();
  if (!asked.pinned().empty()) out->set_pinned(asked.pinned());
  if (asked.scale() > 0) out->set_scale(asked.scale());
  if (d.stop().asked()) out->set_stop_requested(true);
  out->set_mesh_changes(!terminal(d.phase()) &&
                        (d.phase() != pb::Durable::RUNNING || asked.changed() ||
                         in.policy.wanted_change(in.view, 0).has_value()));
  if (!in.shape || !planned) return;
  const geometry::Layout layout = layout_of(d.assignment().mesh());
  if (planner::admit(*in.shape, layout).ok())
    out->set_predicted_bubble(scheduled_bubble(*in.shape, layout));
}

// What would be lost with a host now.
void fill_kept_state(const StatusReporter::Inputs& in, pb::JobStatus* out) {
  const pb::Durable& d = in.view.durable;
  const int64_t committed = in.view.roster.committed_step(d);
  if (!in.keeps_state || committed < 0 ||
      (d.phase() != pb::Durable::RUNNING &&
       d.phase() != pb::Durable::FINISHING))
    return;
  const pb::Assignment& a = d.assignment();
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

}  // namespace

pb::WorkerStatus StatusReporter::worker_status(const Inputs& in,
                                               const std::string& name,
                                               const Roster::Member& m) {
  pb::WorkerStatus out;
  out.set_name(name);
  out.set_incarnation(m.report.incarnation());
  out.set_host(m.report.host());
  out.set_pid(m.report.pid());
  out.set_slots(m.report.slots());
  out.set_cores(m.report.cores());
  out.set_build(m.report.build());
  out.set_age_s(
      std::max(0.0, static_cast<double>(in.view.now_ms - m.heard_ms) / 1000));
  out.set_state(state_of(m));
  out.set_draining(m.leaving());
  if (const pb::HostFaults& faults = in.view.durable.host_faults();
      is_cordoned(faults, m.report.host(), name))
    out.set_cordoned(cordon_reason(faults, m.report.host(), name));
  for (const pb::RankStatus& s : m.report.ranks()) {
    pb::RankStatus* rank = out.add_ranks();
    *rank = s;
    if (m.report.generation() == in.view.durable.generation())
      fill_prediction(in, rank);
  }
  return out;
}

void StatusReporter::fill_prediction(const Inputs& in, pb::RankStatus* rank) {
  const pb::Assignment& a = in.view.durable.assignment();
  if (!in.shape || rank->rank() < 0 || rank->rank() >= a.ranks_size()) return;
  const geometry::Layout layout = layout_of(a.mesh());
  if (!planner::admit(*in.shape, layout).ok()) return;  // of an older job file
  if (predicted_generation_ != a.generation()) predicted_.clear();
  predicted_generation_ = a.generation();
  const auto [it, fresh] = predicted_.try_emplace(rank->rank());
  if (fresh)
    to_message(planner::predict_memory(*in.shape, layout, rank->rank()),
               &it->second);
  *rank->mutable_predicted() = it->second;
}

void StatusReporter::note(const pb::EventRecord& event) {
  constexpr size_t kKept = 50;
  events_.push_back(event);
  if (events_.size() > kKept) events_.pop_front();
}

pb::JobStatus StatusReporter::status(const Inputs& in) {
  const pb::Durable& d = in.view.durable;
  pb::JobStatus s;
  s.set_job(in.options.job.job().name());
  s.set_state(state_of(d.phase()));
  s.set_detail(detail_of(in));
  const Roster::Awaited awaited = in.view.roster.awaited(d, in.view.now_ms);
  if (d.phase() == pb::Durable::WAITING) {
    s.set_missing_slots(static_cast<int>(in.policy.missing_slots(in.view)));
    const auto reason = in.waiting_for.reason;
    const bool answers = reason == pb::JobStatus::NOTHING && awaited.any;
    s.set_wait_reason(answers ? pb::JobStatus::WORKERS : reason);
  }
  if (awaited.any)
    s.set_detail(s.detail().empty() ? awaited.text
                                    : s.detail() + "; " + awaited.text);
  s.set_generation(d.generation());
  if (d.assignment().ranks_size() > 0)
    *s.mutable_mesh() = d.assignment().mesh();
  if (d.assignment().has_prediction())
    s.set_prediction(d.assignment().prediction());
  s.set_coordinator_host(in.options.host);
  s.set_coordinator_pid(in.options.pid);
  s.set_epoch(d.epoch());
  s.set_run_dir(in.options.run_dir);
  s.set_address(in.options.address);
  s.set_no_auth(in.options.no_auth);
  s.set_step(in.view.last_finished);
  s.set_steps(in.options.job.train().steps());
  if (const auto* last = in.ledger.last_metrics()) *s.mutable_last() = *last;
  s.set_checkpoint_step(std::max<int64_t>(0, in.view.saved_step));
  int slots = 0;
  for (const auto& [name, m] : in.view.roster.members()) {
    *s.add_workers() = worker_status(in, name, m);
    if (m.alive && !is_cordoned(d.host_faults(), m.report.host(), name))
      slots += m.report.slots();
  }
  s.set_spares(std::max(0, slots - d.assignment().ranks_size()));
  fill_settings(in, &s);
  fill_kept_state(in, &s);
  const double now_s =
      in.options.unix_offset_s + static_cast<double>(in.view.now_ms) / 1000;
  for (const pb::Cordon& c : d.host_faults().cordons()) {
    *s.add_cordons() = c;
    s.mutable_cordons()->rbegin()->set_remaining_s(remaining_s(c, now_s));
  }
  for (const pb::EventRecord& e : events_) *s.add_events() = e;
  s.set_dropped(in.dropped);
  return s;
}

}  // namespace remesh::core
