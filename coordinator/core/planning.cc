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
  durable_.set_finish_saves(must_save_to_finish());
  for (const auto& [name, m] : members_)
    for (const pb::RankStatus& s : m.report.ranks())
      refused_[s.rank()] = s.refused_stops();
  set_phase(pb::Durable::FINISHING);
}

bool Coordinator::refuses(const std::string& checkpoint) const {
  const auto& bad = durable_.bad_checkpoints();
  return std::find(bad.begin(), bad.end(), checkpoint) != bad.end();
}

// Why to begin with fresh weights would be to forget what was trained: there
// are checkpoints, and none is of use. "" when there are none.
std::string Coordinator::no_checkpoint(const CheckpointsScanned& scan) const {
  size_t bad = scan.invalid.size();
  std::string first = bad > 0 ? scan.invalid.front() : "";
  for (const CheckpointInfo& c : scan.valid) {
    if (c.step > total_steps()) continue;
    ++bad;
    if (first.empty())
      first = c.path + (refuses(c.path) ? ": does not load"
                                        : ": is of a branch that was left");
  }
  if (bad == 0) return "";
  return fmt::format(
      "{} checkpoints exist and none can be loaded ({}); "
      "move them away to start afresh",
      bad, first);
}

int64_t generation_of(const CheckpointInfo& c) {
  if (c.generation != 0 || c.recent.empty()) return c.generation;
  return c.recent.back().generation();
}

// A committed checkpoint proves that every rank committed its step, also
// where reports that said so were lost; reports alone prove nothing yet.
void Coordinator::take_recent(const CheckpointsScanned& scan) {
  proven_.clear();
  for (const CheckpointInfo& c : scan.valid)
    for (const pb::StepMetrics& m : c.recent)
      if (m.step() > last_finished_)
        proven_[m.generation()].emplace(m.step(), m);
}

// What is known of a step on the way of that generation, null: nothing. The
// generation went on from a step that was finished, so it made the step itself,
// unless the record was lost; then a checkpoint knows who did.
const pb::StepMetrics* Coordinator::known_metrics(int64_t generation,
                                                  int64_t step) const {
  const auto found = [step](const auto& by_generation, int64_t g) {
    const auto steps = by_generation.find(g);
    const pb::StepMetrics* none = nullptr;
    if (steps == by_generation.end()) return none;
    const auto m = steps->second.find(step);
    return m == steps->second.end() ? none : &m->second;
  };
  if (const auto* m = found(told_, generation)) return m;
  for (auto g = proven_.upper_bound(generation); g != proven_.begin();) {
    --g;
    if (const auto* m = found(proven_, g->first)) {
      const bool on_the_way =
          g->first == generation || left_by(first_steps_, g->first, step) == 0;
      return on_the_way ? m : nullptr;
    }
    if (!g->second.empty() && g->second.begin()->first < step) break;
  }
  return nullptr;
}

// Without states in memory: the newest checkpoint.
bool Coordinator::choose_source(const CheckpointsScanned& scan,
                                pb::Source* source) {
  const CheckpointInfo* best = nullptr;
  size_t bad = scan.invalid.size();
  for (const CheckpointInfo& c : scan.valid) {
    if (refuses(c.path)) {
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
    take_recent(scan);
    fill_metrics(generation_of(*best), best->step);
    return true;
  }
  if (const std::string none = no_checkpoint(scan); !none.empty()) {
    terminate(pb::Durable::FAILED, none);
    return false;
  }
  source->set_kind(pb::Source::INIT);
  source->set_step(0);
  source->set_reason(last_finished_ == 0
                         ? "start of the job"
                         : "no checkpoint was saved yet: from the start");
  return true;
}

// Steps up to the state's that were not yet known to be finished.
void Coordinator::fill_metrics(int64_t generation, int64_t up_to) {
  while (last_finished_ < up_to) {
    const auto* known = known_metrics(generation, last_finished_ + 1);
    if (known == nullptr) {
      pb::EventRecord e = event("metrics_gap");
      e.set_detail(
          fmt::format("steps {} to {} are finished, their metrics are "
                      "lost",
                      last_finished_ + 1, up_to));
      emit(std::move(e));
      last_finished_ = up_to;
      return;
    }
    append_metrics(*known);
  }
}

void Coordinator::add_ranks(const planner::Deal& deal,
                            pb::Assignment* a) const {
  for (const planner::RankPlace& p : deal.ranks) {
    pb::RankPlace* out = a->add_ranks();
    out->set_rank(p.rank);
    out->set_worker(p.worker);
    out->set_local_slot(p.local_slot);
    out->set_threads(options_.job.train().threads() > 0
                         ? static_cast<int>(options_.job.train().threads())
                         : p.threads);
  }
}

void Coordinator::add_participant(const std::string& name, const Member& m,
                                  pb::Assignment* a) {
  a->add_workers(name);
  a->add_hosts(m.report.host());
  pb::Durable::Member* p = durable_.add_participants();
  p->set_name(name);
  p->set_incarnation(m.report.incarnation());
  p->set_host(m.report.host());
  p->set_slots(m.report.slots());
  p->set_cores(m.report.cores());
  p->set_memory_bytes(m.report.memory_bytes());
}

void Coordinator::plan(const CheckpointsScanned& scan) {
  pb::Assignment a;
  pb::Source* source = a.mutable_source();
  if (!keeps_state() && !choose_source(scan, source)) return;
  if (keeps_state() ? saved_at_end(scan) : source->step() >= total_steps())
    return terminate(pb::Durable::DONE, "");
  const auto wanted = deal();
  if (!wanted.ok()) return;  // too few workers now, or still
  planner::Deal dealt = *wanted;
  if (keeps_state() &&
      (!inventories_known() || !source_from_states(scan, &dealt, source)))
    return;
  // Where a journal was lost, checkpoints may know of more generations.
  durable_.set_generation(std::max(durable_.generation(), scan.claimed));
  for (const CheckpointInfo& c : scan.valid)
    for (const pb::StepMetrics& m : c.recent)
      durable_.set_generation(std::max(durable_.generation(), m.generation()));
  a.set_generation(durable_.generation() + 1);
  *a.mutable_mesh() = mesh_of(dealt.layout);
  add_ranks(dealt, &a);
  durable_.clear_participants();
  for (const auto& [name, m] : members_) {
    const bool has_place =
        std::any_of(a.ranks().begin(), a.ranks().end(),
                    [&](const pb::RankPlace& p) { return p.worker() == name; });
    if (m.alive && m.reported && (!m.leaving() || has_place))
      add_participant(name, m, &a);
  }
  *a.mutable_job() =
      shape_ ? job_on(options_.job, *shape_, dealt.layout) : options_.job;
  a.set_run_dir(options_.run_dir);
  for (auto& [generation, steps] : told_)
    steps.erase(steps.begin(), steps.upper_bound(last_finished_));
  std::erase_if(told_, [](auto& g) { return g.second.empty(); });
  durable_.set_generation(a.generation());
  lost_steps_ = std::max<int64_t>(0, last_finished_ - a.source().step());
  pb::EventRecord e = event("mesh");
  *e.mutable_mesh() = a.mesh();
  const std::optional<pb::Mesh> before = mesh_before();
  if (before) *e.mutable_from() = *before;
  e.set_generation(a.generation());
  e.set_source(source_text(a.source()));
  e.set_lost_steps(lost_steps_);
  e.set_detail(dealt.reason + "; " + a.source().reason());
  *durable_.mutable_assignment() = std::move(a);
  waiting_for_.clear();
  awaited_.clear();
  handed_over_ = false;
  for (auto& [name, m] : members_) m.progress.clear();
  std::string released;
  if (!durable_.rescue()) {
    released = release_pin(dealt.layout);
    durable_.clear_mesh_asked();
  }
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
  const auto told = told_.find(durable_.generation());
  if (told == told_.end() || told->second.empty()) return;
  const int64_t committed = min_committed();
  while (!told->second.empty()) {
    const auto it = told->second.begin();
    if (it->first > committed) return;
    const pb::StepMetrics m = it->second;
    told->second.erase(it);
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
      if (const auto digest = restored_digest()) e.set_digest(*digest);
      emit(std::move(e));
      change_began_ms_ = -1;
      lost_steps_ = 0;
    }
  }
}

// Of the state that the generation began with, when it was asked for.
std::optional<uint64_t> Coordinator::restored_digest() const {
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == durable_.generation())
      for (const pb::RankStatus& s : m.report.ranks())
        if (s.has_restored_digest()) return s.restored_digest();
  return std::nullopt;
}

void Coordinator::append_metrics(const pb::StepMetrics& m) {
  if (std::none_of(first_steps_.begin(), first_steps_.end(),
                   [&](auto& f) { return f.generation == m.generation(); }))
    first_steps_.push_back({m.generation(), m.step()});
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
      // Ranks fail with words of their own, and go on saying them.
      std::string& told = checkpoint_errors_[s.rank()];
      if (s.checkpoint_error() != told) {
        told = s.checkpoint_error();
        if (told.empty()) continue;
        checkpoint_error_ = told;
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
