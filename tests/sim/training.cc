// The life of simulated ranks: start, connect, train, save and end.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/manifest/branch.h"
#include "proto/base/rank_request.h"
#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/sim/sentences.h"

namespace remesh::sim {

uint64_t Cluster::chain(int64_t step) {
  while (static_cast<int64_t>(chain_.size()) <= step)
    chain_.push_back(random_u64(chain_.back(), 1, chain_.size()));
  return chain_[static_cast<size_t>(step)];
}

// Whether a larger mesh is faster is chance, so that all changes are tried.
double Cluster::step_seconds(const pb::Mesh& mesh) const {
  constexpr double kLeastS = 0.05;
  constexpr uint64_t kMostTimes = 16;
  return kLeastS *
         static_cast<double>(
             1 + hash64(fmt::format("{} {} {} {} {}", options_.seed, mesh.dp(),
                                    mesh.pp(), mesh.tp(), mesh.cp())) %
                     kMostTimes);
}

void Cluster::spawn(Worker& w, const pb::Assignment& a) {
  const int64_t g = a.generation();
  for (const auto& [rank, r] : w.ranks)
    if (r.alive)
      violated(fmt::format("{} spawns generation {}, rank {} of {} is alive",
                           w.name, g, rank, r.generation));
  if (!w.spawned.insert(g).second)
    violated(fmt::format("{} spawns generation {} twice", w.name, g));
  if (assignments_[g] != without_sentences(a))
    violated(
        fmt::format("{} spawns another generation {} than planned", w.name, g));
  auto& world = worlds_[g];
  if (!world) {
    world = std::make_unique<World>();
    world->assignment = a;
    world->began_ms = now_ - kTroubleSlackMs;
    world->stalled = cut_apart(*world);
    world->step = world->saved = a.source().step();
    if (a.source().kind() == pb::Source::MEMORY) world->saved = -1;
    if (keeps_state()) describe_states(*world);
  }
  w.ranks.clear();
  w.ranks_generation = g;
  const std::string name = w.name;
  const uint64_t life = w.incarnation;
  if ((faults_on_ && chance(0.02) && !calm_) ||
      bad_of(w.host, w.name) == Bad::kSpawn)
    return spawn_fails(w, *world);
  for (const pb::RankPlace& p : a.ranks()) {
    if (p.worker() != w.name) continue;
    Rank r;
    r.rank = p.rank();
    r.generation = g;
    r.committed = keeps_state() ? -1 : a.source().step();
    r.step = a.source().step();
    w.ranks[p.rank()] = r;
    const int rank = p.rank();
    at(0, [this, name, life, g, rank] {
      Worker& x = *workers_[name];
      if (x.agent && x.incarnation == life)
        drive_worker(x, agent::RankStarted{g, rank, 1000 + rank});
    });
  }
  if (start_badly(w, *world)) return;
  at(uniform(5, 60), [this, name, life, g] {
    Worker& x = *workers_[name];
    if (x.agent && x.incarnation == life && x.ranks_generation == g)
      drive_worker(x, agent::LocalFence{g, 0, fence_blob(name, g, 0)});
  });
}

void Cluster::spawn_fails(Worker& w, World& world) {
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (p.worker() == w.name) world.faulted.insert(p.rank());
  at(uniform(0, 5), [this, name = w.name, life = w.incarnation,
                     g = world.assignment.generation()] {
    Worker& x = *workers_[name];
    if (x.agent && x.incarnation == life)
      drive_worker(x, agent::SpawnFailed{g, -1, "no such file"});
  });
}

void Cluster::rank_ends(Rank& r, int code, int signal, int64_t delay_ms) {
  r.exit_code = code;
  r.signal = signal;
  const int64_t g = r.generation;
  const int rank = r.rank;
  for (auto& [name, w] : workers_) {
    const auto it = w->ranks.find(rank);
    if (it == w->ranks.end() || &it->second != &r) continue;
    const std::string worker = name;
    const uint64_t life = w->incarnation;
    at(delay_ms, [this, worker, life, g, rank] {
      Worker& x = *workers_[worker];
      if (!x.agent || x.incarnation != life || x.ranks_generation != g) return;
      if (!x.ranks.at(rank).alive) return;
      x.ranks.at(rank).alive = false;
      reap(worker, life, g, rank);
    });
  }
}

// SIGCHLD waits while the daemon is frozen.
void Cluster::reap(const std::string& worker, uint64_t life, int64_t g,
                   int rank) {
  Worker& w = *workers_[worker];
  if (!w.agent || w.incarnation != life || w.ranks_generation != g) return;
  if (now_ < w.frozen_until) {
    at(std::min<int64_t>(w.frozen_until - now_, 50),
       [this, worker, life, g, rank] { reap(worker, life, g, rank); });
    return;
  }
  Rank& r = w.ranks.at(rank);
  agent::RankExited e{.generation = g,
                      .rank = rank,
                      .exit_code = r.exit_code,
                      .signal = r.signal,
                      .exit_time = static_cast<double>(time_on(w)) / 1000,
                      .last_log = "",
                      .sample = sample(r)};
  drive_worker(w, e);
}

bool Cluster::intact(const World& world) const {
  if (cut_apart(world)) return false;
  for (const pb::RankPlace& p : world.assignment.ranks()) {
    const auto w = workers_.find(p.worker());
    if (w == workers_.end() || !w->second->agent) return false;
    const auto r = w->second->ranks.find(p.rank());
    if (r == w->second->ranks.end() || !r->second.alive || r->second.stopped ||
        r->second.stuck ||
        r->second.generation != world.assignment.generation())
      return false;
  }
  return true;
}

void Cluster::maybe_connect(World& world) {
  if (world.connected || !intact(world)) return;
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (!world.fences_done[p.worker()].contains(1)) return;
  world.connected = true;
  claimed_ = std::max(claimed_, world.assignment.generation());
  const pb::Source& source = world.assignment.source();
  if (const auto c = checkpoints_.find(source.step());
      source.kind() == pb::Source::CHECKPOINT && c != checkpoints_.end())
    world.origin = c->second.generation;
  trace(
      fmt::format("generation {} is connected", world.assignment.generation()));
  if (!keeps_state()) return schedule_step(world);
  const int64_t g = world.assignment.generation();
  at(uniform(0, 30), [this, g] { restore(g); });
}

void Cluster::schedule_step(World& world) {
  const int64_t g = world.assignment.generation();
  const int64_t step = world.step + 1;
  end_badly(world);
  at(uniform(20, 80), [this, g, step] { finish_step(g, step); });
}

void Cluster::finish_step(int64_t g, int64_t step) {
  World& world = *worlds_[g];
  if (!intact(world)) {
    // A stopped rank may continue later: check again.
    at(100, [this, g, step] {
      World& x = *worlds_[g];
      if (x.step + 1 == step) finish_step(g, step);
    });
    return;
  }
  for (const auto& [other, o] : worlds_) {
    if (other != g && o->connected && !o->presumed_dead &&
        !world.presumed_dead && intact(*o))
      violated(
          fmt::format("generations {} and {} are live together", other, g));
  }
  world.step = step;
  pb::StepMetrics m;
  m.set_step(step);
  m.set_loss(as_loss(chain(step)));
  m.set_step_s(step_seconds(world.assignment.mesh()));
  m.set_generation(g);
  world.recent.push_back(m);
  if (keeps_state()) begin_updates(world, step);
  // Ranks commit one after another; the first one of each worker reports the
  // metrics.
  for (const pb::RankPlace& p : world.assignment.ranks()) {
    const int rank = p.rank();
    at(uniform(0, 10),
       [this, g, rank, step, m] { commit_rank(g, rank, step, m); });
  }
  at(keeps_state() ? 30 : 11, [this, g] { boundary(*worlds_[g]); });
}

void Cluster::boundary(World& world) {
  const int64_t g = world.assignment.generation();
  if (!intact(world)) {
    at(50, [this, g] { boundary(*worlds_[g]); });
    return;
  }
  uint32_t bits = 0;
  bool saves = false;
  int64_t save_request = 0;
  std::vector<Rank*> ranks;
  for (const pb::RankPlace& p : world.assignment.ranks()) {
    Rank& r = workers_[p.worker()]->ranks.at(p.rank());
    ranks.push_back(&r);
    if (r.request == 0) r.declined = 0;
    const uint32_t asked = r.request & ~r.declined;
    bits |= asked;
    saves = saves ||
            ((asked & kRequestStop) != 0 && (asked & kRequestHandoff) == 0);
    save_request = std::max(save_request, r.save_request);
  }
  const bool last = world.step >= job_.train().steps();
  if (!last && (bits & kRequestStop) != 0 && !saves)
    return end_for_handoff(world);
  if (last || (bits & kRequestStop) != 0) {
    const bool failed =
        (disk_full_ || g < claimed_) && world.saved != world.step;
    if (failed && !last && (bits & kRequestForce) == 0) {
      for (Rank* r : ranks) {
        r->declined = r->request & ~kRequestHandoff;
        ++r->declined_stops;
      }
      schedule_step(world);
      return;
    }
    if (!failed) save(world);
    for (Rank* r : ranks) {
      if (failed) world.faulted.insert(r->rank);
      const int64_t delay = uniform(0, 20);
      if (failed)
        rank_ends(*r, 68, 0, delay);
      else
        begin_finalize(*r, delay);
    }
    return;
  }
  const bool asked = save_request > world.save_seen;
  world.save_seen = save_request;
  if ((asked || world.step % job_.checkpoint().interval() == 0) &&
      !disk_full_) {
    // In the background: the save commits only if the ranks live long enough.
    const int64_t step = world.step;
    at(uniform(5, 60), [this, g, step] {
      World& x = *worlds_[g];
      if (intact(x) && x.step - step <= 3 && x.saved < step && g >= claimed_) {
        World copy = x;
        copy.step = step;
        std::erase_if(copy.recent,
                      [&](const auto& m) { return m.step() > step; });
        save(copy);
        x.saved = step;
      }
    });
  }
  schedule_step(world);
}

void Cluster::save(World& world) {
  if (world.saved == world.step && checkpoints_.contains(world.step)) return;
  const int64_t g = world.assignment.generation();
  const auto in_past = [&](int64_t step, const Saved& s) {
    return manifest::of_branch(
        manifest::Origin{world.assignment.source().step(), world.origin}, g,
        step, s.generation);
  };
  if (const auto c = checkpoints_.find(world.step);
      c == checkpoints_.end() || !in_past(c->first, c->second))
    checkpoints_[world.step] = {chain(world.step), world.recent, g,
                                world.tags[world.step], now_};
  for (const pb::StepMetrics& m : world.recent)
    saved_steps_.emplace(m.generation(), m.step());
  // Keeps the three newest, and newer ones of other branches.
  int kept = 0;
  for (auto c = checkpoints_.end(); c != checkpoints_.begin();) {
    --c;
    if (in_past(c->first, c->second) ? ++kept > 3 : kept > 0)
      c = checkpoints_.erase(c);
  }
  world.saved = world.step;
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (p.rank() == 0 && workers_[p.worker()]->ranks.contains(0))
      workers_[p.worker()]->ranks.at(0).checkpoint = world.step;
}

}  // namespace remesh::sim
