// Faults that mislead a coordinator about who is alive and who is who: one-way
// partitions, a coordinator that is cut off, spurious connection loss, ranks
// that cannot be killed, clocks that go back, and two workers with one name.
// Also MPI_Finalize, which needs a coordinator.
#include <fmt/format.h>

#include <algorithm>

#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"

namespace remesh::sim {
namespace {

constexpr uint64_t kElsewhere = 1;  // the host id of an impostor

}  // namespace

void Cluster::schedule_liveness_fault() {
  at(liveness_random_.uniform(300, 4000), [this] {
    if (!faults_on_) return;
    ++stats_.faults;
    liveness_fault();
    schedule_liveness_fault();
  });
}

void Cluster::liveness_fault() {
  const std::vector<Worker*> up = running();
  const int64_t kind = liveness_random_.uniform(0, 6);
  trace(fmt::format("liveness fault {}", kind));
  if (up.empty()) return;
  Worker& w =
      *up[static_cast<size_t>(liveness_random_.uniform(0, std::ssize(up) - 1))];
  switch (kind) {
    case 0:
      note_trouble(
          w, mute_until_[w.name] = now_ + liveness_random_.uniform(100, 4000));
      break;
    case 1:
      note_trouble(
          w, deaf_until_[w.name] = now_ + liveness_random_.uniform(100, 4000));
      for (auto& [g, world] : worlds_)
        world->stalled = true;  // fences are late
      break;
    case 2:
      cut_coordinator_off(now_ + liveness_random_.uniform(500, 6000), false);
      break;
    case 3:
      note_trouble(w, now_);
      lose_connection(w.name);
      break;
    case 4:
      w.kills_wait_until = now_ + liveness_random_.uniform(1000, 50'000);
      note_trouble(w, w.kills_wait_until);
      break;
    case 5:
      turn_clock(w);
      break;
    case 6:
      pretend_to_be(w);
      break;
  }
}

// In both directions, from all workers. The transport closes the connections at
// once or after about dead_after_ms, and makes new ones.
void Cluster::cut_coordinator_off(int64_t until, bool closes) {
  trace("the coordinator is cut off");
  for (auto& [name, w] : workers_) {
    note_trouble(*w, partitioned_until_[name] =
                         std::max(partitioned_until_[name], until));
    // Messages in flight arrive first.
    const int64_t later_ms =
        closes ? liveness_random_.uniform(200, 350)
               : std::max<int64_t>(3000, job_.elastic().dead_after_ms());
    at(later_ms, [this, worker = name] {
      if (partitioned_until_[worker] > now_) lose_connection(worker);
    });
  }
}

void Cluster::lose_connection(const std::string& name) {
  connection_lost_ms_[name] = now_;
  when_awake(core::PeerLost{name});
}

// Its ranks are in an uninterruptible system call: alive, but without progress.
void Cluster::delay_kills(Worker& w) {
  if (now_ >= w.kills_wait_until) return;
  for (auto& [rank, r] : w.ranks) {
    if (!r.alive) continue;
    r.stuck = true;
    worlds_[r.generation]->stalled = true;
  }
}

// ------------------------------------------------------------------- clocks

int64_t Cluster::time_on(const Worker& w) const {
  constexpr int64_t kBootMs = 10'000'000;
  return kBootMs + now_ + w.clock_ms;
}

// If the clock goes back, the next incarnation may have a smaller number.
void Cluster::turn_clock(Worker& w) {
  w.clock_ms += liveness_random_.uniform(100, 100'000) *
                (liveness_random_.chance(0.7) ? -1 : 1);
  if (liveness_random_.chance(0.5)) crash_worker(w);
}

uint64_t Cluster::new_incarnation(Worker& w) {
  const auto by_clock =
      static_cast<uint64_t>(time_on(w)) * 1000 + order_ % 1000 + 1;
  // Usually the worker's temporary files survive and have its last number. The
  // number between is left to hostile.cc.
  if (w.clock_ms == 0 || by_clock > w.incarnation) return by_clock;
  if (liveness_random_.chance(0.5)) return w.incarnation + 2;
  note_trouble(w, now_ + kEarlierLifeMs + 2 * job_.elastic().dead_after_ms());
  return by_clock == w.incarnation ? by_clock - 1 : by_clock;
}

// For a short time another host, perhaps with the same host name, runs a worker
// with this name that was started later. Directives do not reach it.
void Cluster::pretend_to_be(const Worker& w) {
  pb::Report about;
  about.set_worker(w.name);
  about.set_incarnation(w.incarnation + 500);
  about.set_host(w.incarnation % 2 == 0 ? "elsewhere" : w.host);
  about.set_host_id(kElsewhere);
  about.set_slots(2);
  about.set_cores(2);
  about.set_build(builds_[{about.worker(), about.incarnation()}] = w.build);
  trace("another worker " + w.name + " starts elsewhere");
  pretend(std::make_shared<agent::Agent>(about), w.name,
          now_ + liveness_random_.uniform(200, 3000));
}

void Cluster::pretend(const std::shared_ptr<agent::Agent>& agent,
                      const std::string& name, int64_t until) {
  if (now_ >= until || !faults_on_) return;
  for (const agent::Action& a : agent->on(agent::Tick{}, now_))
    if (const auto* s = std::get_if<agent::Send>(&a))
      deliver_to_coordinator(name, core::MessageReceived{s->message});
  at(50, [this, agent, name, until] { pretend(agent, name, until); });
}

// The impostor may be accepted; until some time after its end the real worker's
// reports then count as those of an older incarnation.
void Cluster::note_impostor(const pb::Report& r) {
  Worker& w = *workers_.at(r.worker());
  if (r.host_id() == kElsewhere)
    note_trouble(w, now_ + kEarlierLifeMs + 2 * job_.elastic().dead_after_ms());
}

// ------------------------------------------------------------- MPI_Finalize

// A worker contributes when all its ranks have entered the fence.
void Cluster::begin_finalize(Rank& r, int64_t delay_ms) {
  if (scripted_) return rank_ends(r, 0, 0, delay_ms);  // without the fence
  later(*workers_.at(r.worker), delay_ms,
        [this, g = r.generation, rank = r.rank](Worker& x) {
          if (x.ranks_generation != g || !x.ranks.at(rank).alive) return;
          x.ranks.at(rank).finalizing = true;
          excuse_slow_fences();
          for (const auto& [other, o] : x.ranks)
            if (o.alive && !o.finalizing) return;
          drive_worker(x, agent::LocalFence{g, 2, fence_blob(x.name, g, 2)});
        });
}

void Cluster::end_finalize(Worker& w, int64_t generation) {
  for (auto& [rank, r] : w.ranks)
    if (r.alive && r.finalizing && r.generation == generation)
      rank_ends(r, 0, 0, liveness_random_.uniform(0, 5));
}

// Ranks that wait for a fence make no progress. If the network loses
// contributions, or a worker is late to find a new coordinator, a reported hang
// is excused.
void Cluster::excuse_slow_fences() {
  const bool late =
      std::any_of(reconnected_at_.begin(), reconnected_at_.end(),
                  [this](const auto& r) { return r.second > now_; });
  if (loss_ == 0 && !late) return;
  for (auto& [g, world] : worlds_)
    for (const Rank* r : ranks_of(*world))
      world->stalled = world->stalled || r->finalizing;
}

// Whether ranks are in MPI_Finalize and a daemon was recently cut off: the
// others have made no progress since they entered, which counts as a hang.
bool Cluster::waits_for_fence(const World& world) const {
  constexpr int64_t kMostHangMs = 3000;
  bool finalizing = false;
  bool trouble = false;
  for (const pb::RankPlace& p : world.assignment.ranks()) {
    const Worker& w = *workers_.at(p.worker());
    const auto r = w.ranks.find(p.rank());
    finalizing = finalizing || (r != w.ranks.end() && r->second.finalizing);
    trouble = trouble || w.trouble_until > now_ - kMostHangMs - kTroubleSlackMs;
  }
  return finalizing && trouble;
}

// --------------------------------------------------------------- invariants

// Whether the coordinator considers its present incarnation alive, and it is
// healthy.
bool Cluster::is_known(const std::string& worker) const {
  const auto w = workers_.find(worker);
  return w != workers_.end() && healthy(worker) && considers_live(*w->second);
}

// Whether the coordinator knows several hosts: with one it cannot detect that
// it is cut off.
bool Cluster::knows_hosts() const {
  std::set<std::string> hosts;
  const pb::JobStatus status = coordinator_->status();
  for (const auto& w : status.workers()) hosts.insert(w.host());
  return hosts.size() > 1;
}

// A worker is declared dead only if it is silent or its broken connection is
// not restored in time.
void Cluster::check_lost_worker(const pb::EventRecord& e) {
  const int64_t dead_after = job_.elastic().dead_after_ms();
  const auto heard = heard_ms_.find(e.worker());
  if (e.cause().starts_with("silent") && heard != heard_ms_.end() &&
      now_ - heard->second <= dead_after)
    violated("{} was heard {} ms ago, but is declared silent", e.worker(),
             now_ - heard->second);
  const Worker& w = *workers_.at(e.worker());
  // That of a coordinator which was frozen since the worker started is about
  // the life before.
  const bool of_this_life =
      heard == heard_ms_.end() || heard->second >= w.started_ms;
  if (e.cause().starts_with("silent") && of_this_life && healthy(e.worker()))
    violated("declared silent although it is healthy: " + e.worker());
  const auto closed = connection_lost_ms_.find(e.worker());
  if (e.cause().starts_with("connection") && !w.told_to_leave &&
      closed != connection_lost_ms_.end() &&
      now_ - closed->second <= core::closed_after_ms(-1, dead_after))
    violated(e.worker() + " got no time to connect again");
  if (e.cause().starts_with("it answers") &&
      first_waits_.lasts_ms(now_) > kTroubleSlackMs)
    violated(e.worker() + " is given up before it was told what to do");
  if (e.cause().starts_with("it answers") &&
      now_ > options_.fault_ms + kSettledMs && w.agent &&
      w.trouble_until < now_ - core::kAwaitedMs - kTroubleSlackMs)
    violated("an obedient worker is given up: " + e.worker());
}

}  // namespace remesh::sim
