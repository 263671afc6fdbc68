// The life of simulated ranks: start, connect, train, save and end.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/manifest/branch.h"
#include "proto/base/exit_code.h"
#include "proto/base/rank_request.h"
#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

constexpr const char* kNoSpace = "no space left on device";

}  // namespace

uint64_t Cluster::chain(int64_t step) {
  while (static_cast<int64_t>(chain_.size()) <= step)
    chain_.push_back(random_u64(chain_.back(), 1, chain_.size()));
  return chain_[static_cast<size_t>(step)];
}

// Whether a larger mesh is faster is chance, so that all changes are tried.
double Cluster::step_seconds(const pb::Mesh& mesh) const {
  constexpr double kScriptedS = 0.01;
  if (scripted_) return kScriptedS;
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
      violated("{} spawns generation {}, rank {} of {} is alive", w.name, g,
               rank, r.generation);
  if (!w.spawned.insert(g).second)
    violated("{} spawns generation {} twice", w.name, g);
  if (assignments_[g] != without_sentences(a))
    violated("{} spawns another generation {} than planned", w.name, g);
  auto& world = worlds_[g];
  // The number may be used again once the journal is lost.
  if (!world || bytes_of(world->assignment) != bytes_of(a)) {
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
  if (w.failing_spawns > 0 || (faults_on_ && chance(0.02) && !calm_) ||
      bad_of(w.host, w.name) == Bad::kSpawn)
    return spawn_fails(w, *world);
  for (const pb::RankPlace& p : a.ranks()) {
    if (p.worker() != w.name) continue;
    Rank r;
    r.rank = p.rank();
    r.worker = w.name;
    r.generation = g;
    r.committed = keeps_state() ? -1 : a.source().step();
    r.step = a.source().step();
    w.ranks[p.rank()] = r;
    later(w, 0, [this, g, rank = p.rank()](Worker& x) {
      drive_worker(x, agent::RankStarted{g, rank, 1000 + rank});
    });
  }
  if (start_badly(w, *world)) return;
  later(w, uniform(5, 60), [this, g](Worker& x) {
    if (x.ranks_generation == g)
      drive_worker(x, agent::LocalFence{g, 0, fence_blob(x.name, g, 0)});
  });
}

void Cluster::spawn_fails(Worker& w, World& world) {
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (p.worker() == w.name) world.faulted.insert(p.rank());
  if (w.failing_spawns > 0) --w.failing_spawns;
  const int64_t g = world.assignment.generation();
  later(w, uniform(0, 5), [this, g](Worker& x) {
    drive_worker(x, agent::SpawnFailed{g, -1, x.spawn_error});
  });
}

void Cluster::rank_ends(Rank& r, int code, int signal, int64_t delay_ms) {
  r.exit_code = code;
  r.signal = signal;
  const auto end = [this, g = r.generation, rank = r.rank](Worker& w) {
    if (w.ranks_generation != g || !w.ranks.at(rank).alive) return;
    w.ranks.at(rank).alive = false;
    reap(w, g, rank);
  };
  Worker& w = *workers_.at(r.worker);
  // In a script, too, a signal arrives after what is under way.
  if (scripted_ && signal == 0) return end(w);
  later(w, delay_ms, end);
}

// By a fault.
void Cluster::rank_fails(Rank& r, int code, int signal, int64_t delay_ms) {
  worlds_.at(r.generation)->faulted.insert(r.rank);
  rank_ends(r, code, signal, delay_ms);
}

// SIGCHLD waits while the daemon is frozen.
void Cluster::reap(Worker& w, int64_t g, int rank) {
  if (w.ranks_generation != g) return;
  if (now_ < w.frozen_until)
    return later(w, std::min<int64_t>(w.frozen_until - now_, 50),
                 [this, g, rank](Worker& x) { reap(x, g, rank); });
  Rank& r = w.ranks.at(rank);
  agent::RankExited e{.generation = g,
                      .rank = rank,
                      .exit_code = r.exit_code,
                      .signal = r.signal,
                      .exit_time = r.exit_time > 0
                                       ? r.exit_time
                                       : static_cast<double>(time_on(w)) / 1000,
                      .last_log = "",
                      .sample = sample(r)};
  drive_worker(w, e);
}

bool Cluster::intact(const World& world) const {
  return !cut_apart(world) &&
         std::ranges::all_of(world.assignment.ranks(), [&](const auto& p) {
           const Rank* r = live_rank(world, p.rank());
           return r != nullptr && !r->stopped && !r->stuck;
         });
}

void Cluster::maybe_connect(World& world) {
  if (world.connected) return;
  for (const pb::RankPlace& p : world.assignment.ranks())
    if (!world.fences_done[p.worker()].contains(1)) return;
  if (cut_apart(world)) ranks_say(world, "cannot connect");
  if (!intact(world)) return;
  world.connected = true;
  claimed_ = std::max(claimed_, world.assignment.generation());
  const pb::Source& source = world.assignment.source();
  if (const auto c = checkpoints_.find(source.step());
      source.kind() == pb::Source::CHECKPOINT && c != checkpoints_.end())
    world.origin = c->second.generation;
  ranks_say(world, "are connected");
  if (!keeps_state()) return schedule_step(world);
  takes(uniform(0, 30),
        [this, g = world.assignment.generation()] { restore(g); });
}

void Cluster::schedule_step(World& world) {
  const int64_t g = world.assignment.generation();
  end_badly(world);
  by_itself(uniform(20, 80),
            [this, g, step = world.step + 1] { finish_step(g, step); });
}

void Cluster::finish_step(int64_t g, int64_t step) {
  World& world = *worlds_[g];
  // A stopped rank may continue later: check again.
  if (!intact(world))
    return at(100, [this, g, step] {
      if (worlds_[g]->step + 1 == step) finish_step(g, step);
    });
  for (const auto& [other, o] : worlds_) {
    if (other != g && o->connected && !o->presumed_dead &&
        !world.presumed_dead && intact(*o))
      violated("generations {} and {} are live together", other, g);
  }
  record_step(world, step);
  if (keeps_state()) begin_updates(world, step);
  // Ranks commit one after another.
  for (const pb::RankPlace& p : world.assignment.ranks())
    takes(uniform(0, 10),
          [this, g, rank = p.rank(), step] { commit_rank(g, rank, step); });
  takes(keeps_state() ? 30 : 11, [this, g] { boundary(*worlds_[g]); });
}

void Cluster::record_step(World& world, int64_t step) {
  world.step = step;
  pb::StepMetrics m;
  m.set_step(step);
  m.set_loss(as_loss(chain(step)));
  m.set_step_s(step_seconds(world.assignment.mesh()));
  m.set_generation(world.assignment.generation());
  world.recent.push_back(m);
}

void Cluster::boundary(World& world) {
  const int64_t g = world.assignment.generation();
  if (!intact(world)) return at(50, [this, g] { boundary(*worlds_[g]); });
  uint32_t bits = 0;
  bool saves = false;
  int64_t save_request = 0;
  const std::vector<Rank*> ranks = ranks_of(world);
  for (Rank* r : ranks) {
    if (r->request == 0 || (r->request & kRequestForce) != 0) r->declined = 0;
    const uint32_t asked = r->request & ~r->declined;
    bits |= asked;
    saves = saves ||
            ((asked & kRequestStop) != 0 && (asked & kRequestHandoff) == 0);
    save_request = std::max(save_request, r->save_request);
  }
  const bool last = world.step >= job_.train().steps();
  if (!last && (bits & kRequestStop) != 0 && !saves)
    return end_for_handoff(world);
  if (last || (bits & kRequestStop) != 0)
    return save_and_end(world, last || (bits & kRequestForce) != 0);
  const bool asked = save_request > world.save_seen;
  world.save_seen = save_request;
  const int64_t interval = job_.checkpoint().interval();
  const bool due = asked || (interval > 0 && world.step % interval == 0);
  if (due && disk_full_) ranks[0]->checkpoint_error = kNoSpace;
  if (due && !disk_full_) {
    // In the background: the save commits only if the ranks live long enough.
    const int64_t step = world.step;
    takes(uniform(5, 60), [this, g, step] {
      World& x = *worlds_[g];
      if (intact(x) && x.step - step <= 3 && x.saved < step && g >= claimed_)
        save(x, step);
    });
  }
  schedule_step(world);
}

void Cluster::save_and_end(World& world, bool must) {
  const std::vector<Rank*> ranks = ranks_of(world);
  const bool failed =
      (disk_full_ || world.assignment.generation() < claimed_) &&
      world.saved != world.step;
  if (failed) ranks[0]->checkpoint_error = kNoSpace;
  if (failed && !must) {
    for (Rank* r : ranks) {
      r->declined = r->request & ~kRequestHandoff;
      ++r->declined_stops;
    }
    return schedule_step(world);
  }
  if (!failed) save(world, world.step);
  ranks_say(world, fmt::format("end after step {}", world.step));
  for (Rank* r : ranks) {
    if (failed) r->error = kNoSpace;
    const int64_t delay = uniform(0, 20);
    if (failed)
      rank_fails(*r, kExitSaveFailed, 0, delay);
    else
      begin_finalize(*r, delay);
  }
}

void Cluster::save(World& world, int64_t step) {
  if (world.saved == step && checkpoints_.contains(step)) return;
  const int64_t g = world.assignment.generation();
  const auto in_past = [&](int64_t other, const Saved& s) {
    return manifest::of_branch(
        manifest::Origin{world.assignment.source().step(), world.origin}, g,
        other, s.generation);
  };
  std::vector<pb::StepMetrics> recent = world.recent;
  std::erase_if(recent, [&](const auto& m) { return m.step() > step; });
  for (const pb::StepMetrics& m : recent)
    saved_steps_.emplace(m.generation(), m.step());
  if (const auto c = checkpoints_.find(step);
      c == checkpoints_.end() || !in_past(c->first, c->second))
    checkpoints_[step] = {chain(step), recent, g, world.tags[step], now_};
  // Keeps the three newest, and newer ones of other branches.
  int kept = 0;
  for (auto c = checkpoints_.end(); c != checkpoints_.begin();) {
    --c;
    if (in_past(c->first, c->second) ? ++kept > 3 : kept > 0)
      c = checkpoints_.erase(c);
  }
  world.saved = step;
  ranks_say(world, fmt::format("saved step {}", step));
  auto& ranks = worker_of(world, 0).ranks;
  if (ranks.contains(0)) ranks.at(0).checkpoint = step;
}

}  // namespace remesh::sim
