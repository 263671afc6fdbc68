// Which mesh comes next, from which state, and the steps that are finished.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/job_shape.h"

namespace remesh::core {

void Coordinator::finish_with(const std::string& reason, bool must) {
  if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  durable_.set_finish_reason(reason);
  durable_.set_must_stop(must);
  for (const auto& [name, m] : members_)
    for (const pb::RankStatus& s : m.report.ranks())
      refused_[s.rank()] = s.refused_stops();
  set_phase(pb::Durable::FINISHING);
}

bool Coordinator::choose_source(const CheckpointsScanned& scan,
                                pb::Source* source) {
  const CheckpointInfo* best = nullptr;
  size_t bad = scan.invalid.size();
  for (const CheckpointInfo& c : scan.valid) {
    const auto& refused = durable_.bad_checkpoints();
    if (std::find(refused.begin(), refused.end(), c.path) != refused.end()) {
      ++bad;
      continue;
    }
    if (c.step > total_steps()) continue;
    if (best == nullptr || c.step > best->step) best = &c;
  }
  if (best != nullptr) {
    source->set_kind(pb::Source::CHECKPOINT);
    source->set_step(best->step);
    source->set_path(best->path);
    source->set_reason(
        bad == 0 ? "newest checkpoint"
                 : fmt::format("newest checkpoint that verifies; {} newer or "
                               "older ones do not",
                               bad));
    // A committed checkpoint proves that every rank committed its step, also
    // where reports that said so were lost; reports alone prove nothing yet.
    std::map<int64_t, pb::StepMetrics> proven;
    for (const pb::StepMetrics& m : best->recent) proven.emplace(m.step(), m);
    for (const CheckpointInfo& c : scan.valid)
      for (const pb::StepMetrics& m : c.recent) proven.emplace(m.step(), m);
    proven.merge(pending_metrics_);
    pending_metrics_ = std::move(proven);
    fill_metrics(best->step);
    return true;
  }
  if (bad > 0) {
    std::string first = scan.invalid.empty()
                            ? durable_.bad_checkpoints(0) + ": does not load"
                            : scan.invalid.front();
    terminate(pb::Durable::FAILED,
              fmt::format("{} checkpoints exist and none can be loaded ({}); "
                          "move them away to start afresh",
                          bad, first));
    return false;
  }
  source->set_kind(pb::Source::INIT);
  source->set_step(0);
  source->set_reason(last_finished_ == 0
                         ? "start of the job"
                         : "no checkpoint was saved yet: from the start");
  return true;
}

// Steps up to the checkpoint's that were not yet known to be finished.
void Coordinator::fill_metrics(int64_t up_to) {
  while (last_finished_ < up_to) {
    const auto it = pending_metrics_.find(last_finished_ + 1);
    if (it == pending_metrics_.end()) {
      pb::EventRecord e = event("metrics_gap");
      e.set_detail(
          fmt::format("steps {} to {} are finished, their metrics are "
                      "lost",
                      last_finished_ + 1, up_to));
      emit(std::move(e));
      last_finished_ = up_to;
      return;
    }
    append_metrics(it->second);
  }
}

void Coordinator::plan(const CheckpointsScanned& scan) {
  pb::Assignment a;
  if (!choose_source(scan, a.mutable_source())) return;
  if (a.source().step() >= total_steps())
    return terminate(pb::Durable::DONE, "");
  const auto dealt = deal();
  if (!dealt.ok()) return;  // too few workers now, or still
  // Where a journal was lost, checkpoints may know of more generations.
  for (const CheckpointInfo& c : scan.valid)
    for (const pb::StepMetrics& m : c.recent)
      durable_.set_generation(std::max(durable_.generation(), m.generation()));
  a.set_generation(durable_.generation() + 1);
  *a.mutable_mesh() = mesh_of(dealt->layout);
  for (const planner::RankPlace& p : dealt->ranks) {
    pb::RankPlace* out = a.add_ranks();
    out->set_rank(p.rank);
    out->set_worker(p.worker);
    out->set_local_slot(p.local_slot);
    out->set_threads(options_.job.train().threads() > 0
                         ? static_cast<int>(options_.job.train().threads())
                         : p.threads);
  }
  durable_.clear_participants();
  for (const auto& [name, m] : members_) {
    if (!m.alive || !m.reported || m.leaving()) continue;
    a.add_workers(name);
    a.add_hosts(m.report.host());
    pb::Durable::Member* p = durable_.add_participants();
    p->set_name(name);
    p->set_incarnation(m.report.incarnation());
    p->set_host(m.report.host());
    p->set_slots(m.report.slots());
    p->set_cores(m.report.cores());
    p->set_memory_bytes(m.report.memory_bytes());
  }
  *a.mutable_job() =
      shape_ ? job_on(options_.job, *shape_, dealt->layout) : options_.job;
  a.set_run_dir(options_.run_dir);
  pending_metrics_.clear();
  durable_.set_generation(a.generation());
  lost_steps_ = std::max<int64_t>(0, last_finished_ - a.source().step());
  pb::EventRecord e = event("mesh");
  *e.mutable_mesh() = a.mesh();
  const std::optional<pb::Mesh> before = mesh_before();
  if (before) *e.mutable_from() = *before;
  e.set_generation(a.generation());
  e.set_source(a.source().kind() == pb::Source::INIT ? "initial weights"
                                                     : a.source().path());
  e.set_lost_steps(lost_steps_);
  e.set_detail(dealt->reason + "; " + a.source().reason());
  *durable_.mutable_assignment() = std::move(a);
  waiting_for_.clear();
  for (auto& [name, m] : members_) m.progress.clear();
  const std::string released = release_pin(dealt->layout);
  durable_.clear_mesh_asked();
  set_phase(pb::Durable::PREPARING);
  if (!released.empty()) emit_released(released);
  emit(std::move(e));
}

// ------------------------------------------------------------------- steps

int64_t Coordinator::min_committed() const {
  std::map<int, int64_t> committed;
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == durable_.generation() &&
        participates(name, m.report.incarnation()))
      for (const pb::RankStatus& s : m.report.ranks())
        committed[s.rank()] = s.committed_step();
  const int world = durable_.assignment().ranks_size();
  if (world == 0 || static_cast<int>(committed.size()) < world) return -1;
  int64_t least = committed.begin()->second;
  for (const auto& [rank, step] : committed) least = std::min(least, step);
  return least;
}

void Coordinator::take_metrics() {
  // Also steps that are computed again, or that an earlier life took, show
  // that the generation has started well.
  if (steps_in_generation_ == 0 &&
      min_committed() > durable_.assignment().source().step())
    steps_in_generation_ = 1;
  if (pending_metrics_.empty()) return;
  const int64_t committed = min_committed();
  while (!pending_metrics_.empty()) {
    const auto it = pending_metrics_.begin();
    if (it->first > committed) return;
    const pb::StepMetrics m = it->second;
    pending_metrics_.erase(it);
    if (m.step() <= last_finished_) continue;
    if (m.step() > last_finished_ + 1) {
      pb::EventRecord e = event("metrics_gap");
      e.set_detail(
          fmt::format("steps {} to {} are finished, their metrics are "
                      "lost",
                      last_finished_ + 1, m.step() - 1));
      emit(std::move(e));
    }
    append_metrics(m);
    ++steps_in_generation_;
    step_times_.push_back(m.step_s());
    if (step_times_.size() > 101) step_times_.pop_front();
    durable_.set_failures(0);
    durable_.set_same_failures(0);
    if (change_began_ms_ >= 0 && durable_.phase() == pb::Durable::RUNNING) {
      pb::EventRecord e = event("training");
      *e.mutable_mesh() = durable_.assignment().mesh();
      e.set_seconds(static_cast<double>(now_ms_ - change_began_ms_) / 1000);
      e.set_lost_steps(lost_steps_);
      emit(std::move(e));
      change_began_ms_ = -1;
      lost_steps_ = 0;
    }
  }
}

void Coordinator::append_metrics(const pb::StepMetrics& m) {
  last_finished_ = m.step();
  last_metrics_ = m;
  act(AppendMetrics{m});
}

void Coordinator::watch_checkpoints() {
  for (const auto& [name, m] : members_) {
    if (!m.reported || m.report.generation() != durable_.generation()) continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      if (s.has_checkpoint_step() && s.checkpoint_step() > checkpoint_step_) {
        checkpoint_step_ = s.checkpoint_step();
        checkpoint_error_.clear();
        pb::EventRecord e = event("checkpoint");
        e.set_step(checkpoint_step_);
        emit(std::move(e));
      }
      if (!s.checkpoint_error().empty() &&
          s.checkpoint_error() != checkpoint_error_) {
        checkpoint_error_ = s.checkpoint_error();
        pb::EventRecord e = event("checkpoint_failed");
        e.set_rank(s.rank());
        e.set_worker(name);
        e.set_cause(checkpoint_error_);
        emit(std::move(e));
      }
    }
  }
}

}  // namespace remesh::core
