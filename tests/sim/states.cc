// The states of simulated ranks in shared memory: restore, update, replication
// and handoff, and the invariants that they must satisfy.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/survival.h"
#include "proto/base/exit_code.h"
#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"

namespace remesh::sim {
namespace {

constexpr int64_t kRestoredMs = 60;  // own states and their replicas

}  // namespace

void Cluster::describe_states(World& world) {
  const pb::Assignment& a = world.assignment;
  world.planned_ms = now_;
  std::vector<memory::RankHost> places;
  std::vector<int> classes;
  for (const pb::RankPlace& p : a.ranks()) {
    world.holdings[p.rank()] = make_holding(*table_, a, p.rank(), 0, false);
    places.push_back({p.worker(), worker_of(world, p.rank()).host});
    classes.push_back(geometry::replica_group(core::sharding_of(a), p.rank()));
  }
  const auto& e = job_.elastic();
  world.replicas = memory::place_replicas(
      places, classes,
      e.replicate_every() > 0 ? static_cast<int>(e.replicas()) : 0);
}

std::set<std::string> Cluster::hosts_of(const World& world) const {
  std::set<std::string> hosts;
  for (const pb::RankPlace& p : world.assignment.ranks())
    hosts.insert(workers_.at(p.worker())->host);
  return hosts;
}

Cluster::Worker& Cluster::worker_of(const World& world, int rank) const {
  return *workers_.at(world.assignment.ranks(rank).worker());
}

void Cluster::ranks_say(const World& world, const std::string& what) {
  say(fmt::format("ranks of g{} {}", world.assignment.generation(), what));
}

Cluster::Rank* Cluster::live_rank(const World& world, int rank) const {
  Worker& w = worker_of(world, rank);
  const auto r = w.ranks.find(rank);
  const bool alive = w.agent && r != w.ranks.end() && r->second.alive &&
                     r->second.generation == world.assignment.generation();
  return alive ? &r->second : nullptr;
}

std::vector<Cluster::Rank*> Cluster::ranks_of(const World& world) const {
  std::vector<Rank*> out;
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (Rank* r = live_rank(world, p.rank())) out.push_back(r);
  return out;
}

// ----------------------------------------------------------------- restore

void Cluster::restore(int64_t g) {
  World& world = *worlds_[g];
  if (!intact(world)) return at(50, [this, g] { restore(g); });
  const pb::Source& source = world.assignment.source();
  const int64_t step = source.step();
  if (source.kind() == pb::Source::MEMORY) {
    if (!restore_from_memory(world)) return;
  } else if (source.kind() == pb::Source::INIT) {
    world.tags[step] = chain(0);
  } else if (const auto c = checkpoints_.find(step); c != checkpoints_.end()) {
    world.tags[step] = c->second.tag;
  } else {
    // Removed meanwhile by ranks that are cut off and keep saving.
    return cannot_restore(world, fmt::format("step-{}: removed", step));
  }
  // States that are not read are removed to make room. With other faults they
  // must stay.
  const bool reads = source.kind() == pb::Source::MEMORY;
  const int64_t read = reads ? source.states(0).generation() : 0;
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (calm_) workers_[p.worker()]->memory.forget_before(g, read);
  for (const pb::RankPlace& p : world.assignment.ranks()) {
    takes(uniform(0, 20), [this, g, rank = p.rank(), step] {
      World& x = *worlds_[g];
      Rank* r = live_rank(x, rank);
      if (r == nullptr) return;
      commit_state(x, rank, step);
      r->committed = step;
      replicate(x, rank, step, /*awaited=*/false);
    });
  }
  takes(kRestoredMs, [this, g, step] {
    if (step < job_.train().steps())
      schedule_step(*worlds_[g]);
    else
      boundary(*worlds_[g]);  // all that is left is to save
  });
}

void Cluster::cannot_restore(World& world, const std::string& why) {
  Rank* r = live_rank(world, 0);
  r->error = why;
  rank_fails(*r, kExitBadSource, 0, 0);
}

// Each state of the source must be where the coordinator expects it, unless it
// was lost since. The states must be of one generation, complete and equal.
bool Cluster::restore_from_memory(World& world) {
  const pb::Assignment& a = world.assignment;
  const pb::Source& source = a.source();
  const std::set<std::string> hosts = hosts_of(world);
  std::set<uint64_t> tags;
  for (const pb::StateHolding& h : source.states()) {
    const Worker& w = *workers_[h.worker()];
    if (!hosts.contains(w.host))
      violated("step {} is to be read on {}, which has no rank", h.step(),
               w.host);
    const auto* record = w.memory.find(h.generation(), h.step(), h.rank());
    const bool spoiled = spoiled_.contains({h.worker(), h.step()});
    if (record != nullptr && !spoiled) {
      tags.insert(record->tag);
      continue;
    }
    const Start& start = starts_[a.generation()];
    if (record == nullptr && !start.lost.contains(w.name) &&
        w.memory_lost_ms < start.ms && loss_ == 0 && w.trouble_until < start.ms)
      violated("step {} of rank {} is not in the memory of {}", h.step(),
               h.rank(), h.worker());
    cannot_restore(
        world,
        fmt::format("step {} of rank {} on {} {}", h.step(), h.rank(), w.name,
                    record != nullptr ? "does not verify" : "is not there"));
    return false;
  }
  if (tags.size() != 1) violated("states of two branches were combined");
  world.tags[source.step()] = *tags.begin();
  world.origin = source.states(0).generation();
  const auto from = worlds_.find(source.states(0).generation());
  if (from == worlds_.end() || !was_complete(*from->second, source.step()))
    violated("step {} of generation {} was never complete", source.step(),
             source.states(0).generation());
  return true;
}

// Whether every part of the state was committed by a rank of the generation.
bool Cluster::was_complete(const World& world, int64_t step) const {
  const auto own = world.own.find(step);
  if (own == world.own.end()) return false;
  const geometry::Sharding cut = core::sharding_of(world.assignment);
  std::set<int> whole;
  for (const int rank : own->second)
    whole.insert(geometry::replica_group(cut, rank));
  return static_cast<int>(whole.size()) == geometry::num_replica_groups(cut);
}

// ------------------------------------------------------------------- steps

// All ranks have agreed on the step, so the state before it is complete.
void Cluster::begin_updates(World& world, int64_t step) {
  const pb::Assignment& a = world.assignment;
  const int64_t g = a.generation();
  const bool first = step == a.source().step() + 1;
  for (const pb::RankPlace& p : a.ranks()) {
    StateMemory& memory = workers_[p.worker()]->memory;
    if (first) memory.forget_before(g);
    if (first) forgotten_before_ = std::max(forgotten_before_, g);
    memory.begin(g, p.rank(), false);
  }
  if (first && (metrics_.empty() || step > metrics_.back().step()))
    note_safe(g, now_);
  world.tags[step] = random_u64(world.tags[step - 1], static_cast<uint64_t>(g),
                                static_cast<uint64_t>(step));
}

void Cluster::commit_state(World& world, int rank, int64_t step) {
  pb::StateHolding h = world.holdings[rank];
  h.set_step(step);
  worker_of(world, rank).memory.commit(h, world.tags[step]);
  world.own[step].insert(rank);
}

void Cluster::commit_rank(int64_t g, int rank, int64_t step) {
  World& world = *worlds_[g];
  Rank* r = live_rank(world, rank);
  if (r == nullptr) return;
  publish(world, *r, step);
  if (!keeps_state()) return report_committed(world, rank, step);
  commit_state(world, rank, step);
  const int64_t every = job_.elastic().replicate_every();
  if (every == 1) return replicate(world, rank, step, /*awaited=*/true);
  report_committed(world, rank, step);
  if (every > 0 && step % every == 0)
    replicate(world, rank, step, /*awaited=*/false);
}

// awaited: the rank reports the step as committed once all holders have it.
void Cluster::replicate(World& world, int rank, int64_t step, bool awaited) {
  const int64_t g = world.assignment.generation();
  const auto& holders = world.replicas.holders[static_cast<size_t>(rank)];
  world.replicas_left[rank] = static_cast<int>(holders.size());
  if (holders.empty() && awaited) report_committed(world, rank, step);
  for (const int holder : holders) {
    const auto memory_of = [this, g, rank, holder]() -> StateMemory* {
      const World& w = *worlds_[g];
      const bool both =
          live_rank(w, holder) != nullptr && live_rank(w, rank) != nullptr;
      return both ? &worker_of(w, holder).memory : nullptr;
    };
    const int64_t began = uniform(0, 8);
    takes(began, [memory_of, g, rank] {
      if (StateMemory* m = memory_of()) m->begin(g, rank, true);
    });
    takes(began + uniform(0, 8), [this, memory_of, g, rank, step, awaited] {
      StateMemory* m = memory_of();
      if (m == nullptr) return;
      World& w = *worlds_[g];
      pb::StateHolding h = w.holdings[rank];
      h.set_step(step);
      h.set_replica(true);
      m->commit(h, w.tags[step]);
      if (--w.replicas_left[rank] == 0 && awaited)
        report_committed(w, rank, step);
    });
  }
}

void Cluster::report_committed(World& world, int rank, int64_t step) {
  Rank* r = live_rank(world, rank);
  if (r == nullptr) return;
  r->committed = step;
  r->step = step;
  ++r->progress;
  world.committed[rank] = step;
  const int n = world.assignment.ranks_size();
  bool all = static_cast<int>(world.committed.size()) == n;
  for (const auto& [other, s] : world.committed) all = all && s >= step;
  if (all) world.complete_ms.emplace(step, now_);
}

// The last step is replicated whatever replicate_every is; then all ranks end.
void Cluster::end_for_handoff(World& world) {
  const int64_t every = job_.elastic().replicate_every();
  const int64_t g = world.assignment.generation();
  ++stats_.handoffs;
  ranks_say(world, fmt::format("end for a handoff after step {}", world.step));
  for (const Rank* alive : ranks_of(world)) {
    const int rank = alive->rank;
    if (every > 1 && world.step % every != 0)
      replicate(world, rank, world.step, /*awaited=*/false);
    takes(20 + uniform(0, 20), [this, g, rank] {
      if (Rank* r = live_rank(*worlds_[g], rank)) begin_finalize(*r, 0);
    });
  }
}

// ------------------------------------------------------------------ faults

void Cluster::lose_memory(Worker& w) {
  w.memory.clear();
  w.memory_lost_ms = now_;
}

void Cluster::lose_host(Worker& w) {
  trace("host " + w.host + " is lost");
  for (auto& [name, other] : workers_) {
    if (other->host != w.host) continue;
    lose_memory(*other);
    crash_worker(*other);
  }
}

void Cluster::scale() {
  if (!coordinator_) return;
  pb::Command c;
  c.set_kind(pb::Command::SCALE);
  c.set_slots(static_cast<int>(uniform(0, 4)));
  trace(fmt::format("scale {}", c.slots()));
  ask(c);
}

// -------------------------------------------------------------- invariants

// A later state is of an older generation only if the job went back to its
// steps.
void Cluster::note_safe(int64_t generation, int64_t ms) {
  if (ms < safe_ms_ && generation >= safe_generation_) return;
  safe_generation_ = generation;
  safe_ms_ = ms;
}

// The first rank of each worker publishes the metrics.
void Cluster::publish(World& world, Rank& r, int64_t step) {
  if (workers_.at(r.worker)->ranks.begin()->first != r.rank) return;
  world.reporters[step].insert(r.worker);
  for (const pb::StepMetrics& m : world.recent)
    if (m.step() == step) r.ring.push_back(m);
}

// Whether a live daemon has the metrics of the step, if the world finished it.
bool Cluster::reporter_is_here(const World& world, int64_t step) const {
  const auto here = world.reporters.find(step);
  return !was_complete(world, step) ||
         (here != world.reporters.end() &&
          std::ranges::any_of(here->second, [&](const auto& name) {
            return considers_live(*workers_.at(name));
          }));
}

void Cluster::check_source(const pb::Durable& d) {
  const pb::Source& s = d.assignment().source();
  if (s.kind() == pb::Source::MEMORY) ++stats_.from_memory;
  if (s.step() < newest_scanned_)
    violated("generation {} starts from step {}, a checkpoint has step {}",
             d.generation(), s.step(), newest_scanned_);
  check_lost(d);
  if (s.kind() == pb::Source::MEMORY && !metrics_.empty() &&
      !lost_since_record_)
    check_branch(metrics_.back(), s.states(0).generation());
}

// Each state of the source is where the coordinator says, as far as it can
// know: it may not have heard yet that a daemon, and perhaps its memory, is
// gone.
void Cluster::check_source_is_there(const pb::Durable& d) {
  Start& start = starts_[d.generation()];
  start.ms = now_;
  const pb::JobStatus status = coordinator_->status();
  for (const pb::StateHolding& h : d.assignment().source().states()) {
    const Worker& w = *workers_[h.worker()];
    if (w.memory.find(h.generation(), h.step(), h.rank()) != nullptr) continue;
    start.lost.insert(w.name);
    const bool taken_for_live = std::any_of(
        status.workers().begin(), status.workers().end(), [&](const auto& s) {
          return s.name() == w.name && s.state() != pb::WorkerStatus::DEAD;
        });
    if (!taken_for_live || (w.agent && considers_live(w)))
      violated(
          "generation {} runs, and step {} of rank {} is "
          "known not to be in the memory of {}",
          d.generation(), h.step(), h.rank(), w.name);
  }
}

// The generation continues from the recorded version of the last step, not from
// another one.
void Cluster::check_branch(const pb::StepMetrics& last, int64_t generation) {
  const auto recorded = worlds_.find(last.generation());
  const auto follows = worlds_.find(generation);
  if (recorded == worlds_.end() || follows == worlds_.end()) return;
  const auto& was = recorded->second->tags;
  const auto& is = follows->second->tags;
  if (was.contains(last.step()) && is.contains(last.step()) &&
      was.at(last.step()) != is.at(last.step()))
    violated(
        "continues generation {}, which has another step {} "
        "than that of generation {} in the record",
        generation, last.step(), last.generation());
}

// No finished step is lost while its state is in the memory of live workers:
// with n replicas of each step, n hosts may be lost.
void Cluster::check_lost(const pb::Durable& d) {
  const int64_t finished = metrics_.empty() ? 0 : metrics_.back().step();
  const int64_t lost = finished - d.assignment().source().step();
  if (lost <= 0) return;
  stats_.lost_steps += lost;
  lost_since_record_ = true;
  const auto world = worlds_.find(safe_generation_);
  safe_generation_ = 0;
  if (world == worlds_.end() || forgot_) return;
  const auto& e = job_.elastic();
  const pb::HostFaults& faults = d.host_faults();
  const std::set<std::string> hosts = hosts_of(*world->second);
  std::set<std::string> gone, builds;
  for (const pb::RankPlace& p : world->second->assignment.ranks()) {
    const Worker& w = *workers_[p.worker()];
    const bool here =
        w.told_to_leave.value_or(false) || (w.agent && considers_live(w));
    const bool may_leave = !w.told_to_leave.value_or(true);
    // No rescue is tried any more where ranks failed that often.
    const bool barred = std::any_of(
        faults.cordons().begin(), faults.cordons().end(), [&](const auto& c) {
          return core::concerns(c, w.host, p.worker()) && !c.in_training() &&
                 !core::rescue_wait_ms(c.failures(), e);
        });
    // A host that was lost just before the others committed their parts of the
    // step also took its replicas with it.
    if (!here || may_leave || barred ||
        w.memory_lost_ms >= world->second->planned_ms)
      gone.insert(w.host);
  }
  for (const std::string& host : faults.link_search().apart())
    if (faults.link_search().failures() >= e.max_same_failures())
      gone.insert(host);
  size_t may_go = 0;
  if (e.replicate_every() == 1 && hosts.size() > 1)
    may_go = std::min<size_t>(e.replicas(), hosts.size() - 1);
  // Ranks of two builds are never mixed: one build may hold all of the state
  // and have too few slots, the other one enough slots and no state.
  for (const auto& [name, w] : workers_)
    if (w->agent || considers_live(*w)) builds.insert(w->build);
  if (builds.size() > 1) return;
  if (gone.size() <= may_go)
    violated("generation {} loses {} finished steps: {}", d.generation(), lost,
             d.assignment().source().reason());
}

}  // namespace remesh::sim
