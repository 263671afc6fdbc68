// What goes wrong, and what users ask for meanwhile.
#include <fmt/format.h>

#include <algorithm>

#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"

namespace remesh::sim {

void Cluster::schedule_fault() {
  at(uniform(50, 1200), [this] {
    if (!faults_on_) return;
    ++stats_.faults;
    random_fault();
    schedule_fault();
  });
}

void Cluster::note_trouble(Worker& w, int64_t until) {
  w.trouble_until = std::max(w.trouble_until, until);
}

void Cluster::random_fault() {
  std::vector<Worker*> up;
  std::vector<Rank*> ranks;
  for (auto& [name, w] : workers_) {
    if (w->agent) up.push_back(w.get());
    if (w->agent)
      for (auto& [rank, r] : w->ranks)
        if (r.alive) ranks.push_back(&r);
  }
  const auto worker = [&]() -> Worker* {
    return up.empty() ? nullptr
                      : up[static_cast<size_t>(
                            uniform(0, static_cast<int64_t>(up.size()) - 1))];
  };
  const auto rank = [&]() -> Rank* {
    return ranks.empty() ? nullptr
                         : ranks[static_cast<size_t>(uniform(
                               0, static_cast<int64_t>(ranks.size()) - 1))];
  };
  const int64_t kind = uniform(0, 15);
  trace(fmt::format("fault {}", kind));
  switch (kind) {
    case 0:
    case 1:
      if (Rank* r = rank()) {
        worlds_[r->generation]->faulted.insert(r->rank);
        rank_ends(*r, 0, 9, 0);
      }
      break;
    case 2:
      if (Rank* r = rank()) {
        worlds_[r->generation]->faulted.insert(r->rank);
        rank_ends(*r, 1, 0, 0);
      }
      break;
    case 3:
      if (Rank* r = rank()) {
        worlds_[r->generation]->stood = true;
        r->stopped = true;
      }
      break;
    case 4:
      if (Rank* r = rank()) {
        worlds_[r->generation]->stood = true;
        r->stuck = true;
      }
      break;
    case 5:
    case 6:
      if (Worker* w = worker()) crash_worker(*w);
      break;
    case 7:
      if (Worker* w = worker())
        note_trouble(*w, w->frozen_until = now_ + uniform(100, 4000));
      break;
    case 8:
      // One that has exited is started by resume().
      if (coordinator_ && !coordinator_->ended()) crash_coordinator();
      break;
    case 9:
      coordinator_frozen_until_ = now_ + uniform(100, 2500);
      break;
    case 10:
      if (Worker* w = worker())
        note_trouble(*w,
                     partitioned_until_[w->name] = now_ + uniform(100, 4000));
      break;
    case 11:
      if (workers_.size() < 6) start_worker(add_worker());
      break;
    case 12:
      if (chance(0.5)) {
        disk_full_ = !disk_full_;
      } else if (up.size() > 1) {
        Worker* w = worker();
        if (chance(0.5)) {
          w->terminated = true;
          drive_worker(*w, agent::Terminate{});
        } else if (coordinator_) {
          pb::Command c;
          c.set_kind(pb::Command::DRAIN);
          c.set_worker(w->name);
          ask(c);
        }
      }
      break;
    case 13:
      ask_mesh();
      break;
    case 14:
      if (Worker* w = worker()) lose_host(*w);
      break;
    case 15:
      scale();
      break;
  }
}

// `remesh mesh` with a layout of up to four ranks, or auto. Nothing is lost by
// a refusal.
void Cluster::ask_mesh() {
  if (!coordinator_) return;
  pb::Command c;
  c.set_kind(pb::Command::MESH);
  const auto degree = [this] { return chance(0.6) ? 1 : 2; };
  c.set_layout(chance(0.2) ? "auto"
                           : fmt::format("dp{},pp{},tp{},cp{}", uniform(1, 3),
                                         degree(), degree(), degree()));
  trace("mesh " + c.layout());
  ask(c);
}

// No more faults; what was down comes up, and there is always a worker.
void Cluster::heal() {
  trace("faults stop");
  faults_on_ = false;
  disk_full_ = false;
  partitioned_until_.clear();
  reconnected_at_.clear();
  if (coordinator_ && coordinator_->ended()) {
    // Stopped as asked; resume() is under way.
  } else if (!coordinator_ && !done_) {
    start_coordinator();
  }
  for (auto& [name, w] : workers_) {
    w->frozen_until = 0;
    start_worker(*w);
  }
  start_worker(add_worker());
  start_worker(add_worker());
}

}  // namespace remesh::sim
