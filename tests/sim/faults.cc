// Faults, and the commands of users meanwhile.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "proto/base/exit_code.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"

namespace remesh::sim {

void Cluster::choose_bad_host() {
  choose_many_bad_hosts();
  if (!calm_) choose_cut_off();
  if (!calm_ && choose_outage()) return;
  if (!calm_) choose_link_of_many();
  if (!calm_) choose_bad_place();
  if (calm_) return;
  if (host_random_.below(4) != 0) return choose_bad_link();
  const std::string host = fmt::format("h{}", host_random_.below(3));
  bad_hosts_[host] = static_cast<Bad>(1 + host_random_.below(5));
  repaired_ = host_random_.below(2) == 0;
}

// Only the coordinator may die, and the limits on failures are those of a real
// job.
void Cluster::make_calm() {
  calm_ = true;
  stop_ = upgrades_ = false;
  loss_ = crash_between_actions_ = 0;
  auto* e = job_.mutable_elastic();
  e->set_max_same_failures(3);
  e->set_max_failures_without_progress(10);
  options_.end_ms += 600'000;
}

// For as long as a switch may take to restart. The ranks continue to train.
void Cluster::choose_cut_off() {
  Random random(options_.seed * 0x9FB21C651E98DF25ULL + 2);
  if (random.below(16) != 0) return;
  make_calm();
  cut_off_ = true;
  hostile_ = 0;  // hostile messages would be heard
  num_workers_ = workers_a_host_ + 1 + random.below(4);
  job_.mutable_train()->set_steps(200 + random.below(400));
  options_.fault_ms += 60'000;
  const bool closes = random.below(2) == 0;
  const int64_t begins_ms = 800 + random.below(5000);
  const int64_t lasts_ms =
      500 + random.below(random.below(2) == 0 ? 4000 : 45'000);
  at(begins_ms, [this, lasts_ms, closes] {
    cut_coordinator_off(now_ + lasts_ms, closes);
  });
}

// The storage returns errors on all hosts or on one. Nothing is lost by that,
// so nothing may end the job, and it continues from the newest state
// afterwards.
bool Cluster::choose_outage() {
  Random random(options_.seed * 0x9FB21C651E98DF25ULL + 4);
  if (random.below(16) != 0) return false;
  if (random.below(2) == 0) make_calm();
  options_.end_ms += 120'000;
  job_.mutable_train()->set_steps(job_.train().steps() + random.below(200));
  const int64_t begins_ms = 800 + random.below(5000);
  const int64_t lasts_ms =
      500 + random.below(random.below(2) == 0 ? 4000 : 45'000);
  if (random.below(2) == 0) outage_ = fmt::format("h{}", random.below(3));
  options_.fault_ms = std::max(options_.fault_ms, begins_ms + lasts_ms);
  at(begins_ms, [this, lasts_ms, who = random.below(4)] {
    if (!faults_on_) return;
    trace("the storage returns errors on " +
          (outage_.empty() ? "all hosts" : outage_));
    outage_until_ = now_ + lasts_ms;
    for (Worker* w : running())
      for (Rank* r : live_ranks(*w))
        if (in_outage(w->host) && who != 0) cannot_read(*r);
  });
  return true;
}

void Cluster::cannot_read(Rank& r) {
  r.error = kReadError;
  rank_fails(r, kExitUnreadable, 0, r.rank % 30);
}

// Any of the initial hosts except one, either all in the same way or not.
void Cluster::choose_many_bad_hosts() {
  Random random(options_.seed * 0x9FB21C651E98DF25ULL + 1);
  if (random.below(16) != 0) return;
  make_calm();
  num_workers_ = 4 + random.below(11);
  const int64_t hosts = (num_workers_ + 1) / workers_a_host_;
  const int64_t good = random.below(hosts);
  const bool alike = random.below(2) == 0;
  const auto kind = [&] { return static_cast<Bad>(1 + random.below(7)); };
  const Bad all = kind();
  for (int64_t h = 0; h < hosts; ++h)
    if (h != good && random.below(3) != 0)
      bad_hosts_[fmt::format("h{}", h)] = alike ? all : kind();
}

// With replicas, so that each of the two hosts holds what is needed. A hang at
// the start takes half a minute to detect, and which link is bad is not known
// at once.
void Cluster::choose_bad_link() {
  if (host_random_.below(16) != 0) return;
  const int64_t a = host_random_.below(3);
  bad_link_ = {fmt::format("h{}", a),
               fmt::format("h{}", (a + 1 + host_random_.below(2)) % 3)};
  auto* e = job_.mutable_elastic();
  e->set_max_same_failures(3);
  e->set_replicas(1);
  e->set_replicate_every(1);
  options_.end_ms += 600'000;
  cut_link_at(host_random_.below(options_.fault_ms));
}

void Cluster::cut_link_at(int64_t delay_ms) {
  at(delay_ms, [this] {
    trace("the link between " + bad_link_.first + " and " + bad_link_.second +
          " is cut");
    cut_links_.insert(bad_link_);
    for (auto& [g, world] : worlds_)
      world->stalled = world->stalled || cut_apart(*world);
  });
}

// Every rank reports that it waits for a collective, and that is all that is
// known.
void Cluster::choose_link_of_many() {
  Random random(options_.seed * 0x9FB21C651E98DF25ULL + 3);
  if (random.below(24) != 0) return;
  make_calm();
  auto* e = job_.mutable_elastic();
  e->set_replicas(1);
  e->set_replicate_every(1);
  job_.mutable_train()->set_steps(40 + random.below(40));
  const int64_t hosts = 4 + random.below(8);
  num_workers_ = hosts * workers_a_host_;
  const int64_t a = random.below(hosts);
  const int64_t b = (a + 1 + random.below(hosts - 1)) % hosts;
  bad_link_ = std::minmax(fmt::format("h{}", a), fmt::format("h{}", b));
  cut_link_at(400 + random.below(3000));
}

// No mesh is stopped for one that does not fit into the shared memory of the
// hosts known at the time.
void Cluster::check_room(const pb::EventRecord& e) {
  if (e.event() == "generation_ended") planned_stop_ = true;
  if (e.event() == "mesh") planned_stop_ = false;
  if (const auto w = workers_.find(e.worker());
      w != workers_.end() && e.event() == "worker_joined")
    joined_ms_.emplace(w->second->host, now_);
  const auto joined = joined_ms_.find(e.host());
  if (calm_ && planned_stop_ && e.event() == "host_cordoned" &&
      e.cause().find("shared memory") != std::string::npos &&
      joined != joined_ms_.end() && joined->second < finishing_ms_)
    violated("a mesh stopped for a host without room: " + e.ShortDebugString());
}

// The search takes about as many hangs as the logarithm of the number of links,
// and names the right one.
void Cluster::check_link_search(const pb::EventRecord& e) {
  if (!calm_ || bad_link_.first.empty()) return;
  std::set<std::string> hosts;
  for (const auto& [name, w] : workers_) hosts.insert(w->host);
  if (e.event() == "failure" &&
      ++hangs_ > 3 + 2 * std::lround(std::log2(hosts.size())))
    violated("{} hangs, and the link is still not found", hangs_);
  if (e.event() != "host_cordoned") return;
  const bool first = e.host() == bad_link_.first;
  const std::string& peer = first ? bad_link_.second : bad_link_.first;
  // The host, if it was not proven to work with others.
  const bool link = e.detail().find("link to ") != std::string::npos;
  if ((!first && e.host() != bad_link_.second) ||
      (link && e.detail().find("link to " + peer + " ") == std::string::npos))
    violated("a healthy link is blamed: " + e.ShortDebugString());
}

// Whether some ranks of the world cannot reach each other.
bool Cluster::cut_apart(const World& world) const {
  if (cut_links_.empty()) return false;
  const std::set<std::string> hosts = hosts_of(world);
  return std::ranges::any_of(cut_links_, [&](const auto& link) {
    return hosts.contains(link.first) && hosts.contains(link.second);
  });
}

// Whether the worker's ranks end before they can connect.
bool Cluster::start_badly(Worker& w, World& world) {
  if (in_outage(w.host) &&
      world.assignment.source().kind() != pb::Source::INIT) {
    for (auto& [rank, r] : w.ranks) cannot_read(r);
    return true;
  }
  const Bad bad = bad_of(w.host, w.name);
  if (bad == Bad::kNone || bad == Bad::kDies || bad == Bad::kSmall ||
      bad >= Bad::kHangs)
    return connects_badly(w, world);
  trace(fmt::format("ranks fail to start on {}", w.host));
  const int code = bad == Bad::kCrash    ? 0
                   : bad == Bad::kCannot ? kExitFailed
                   : bad == Bad::kNoRoom ? kExitNoRoom
                                         : kExitBadSource;
  for (auto& [rank, r] : w.ranks)
    rank_fails(r, code, code == 0 ? 9 : 0, 1 + host_random_.below(30));
  return true;
}

// In the first step, or in the second.
void Cluster::end_badly(World& world) {
  for (Rank* r : ranks_of(world)) {
    const Bad bad = bad_of(workers_.at(r->worker)->host, r->worker);
    if (bad == Bad::kDies || (bad == Bad::kDiesLater &&
                              world.step > world.assignment.source().step()))
      rank_fails(*r, 0, 9, 1 + host_random_.below(15));
  }
}

// Whether the coordinator knows healthy hosts that stay.
bool Cluster::others_could_run() const {
  if (!coordinator_) return false;
  const pb::JobStatus status = coordinator_->status();
  return std::any_of(
      status.workers().begin(), status.workers().end(), [&](const auto& w) {
        return bad_of(w.host(), w.name()) == Bad::kNone &&
               w.state() != pb::WorkerStatus::DEAD &&
               w.state() != pb::WorkerStatus::AWAITED && !w.draining();
      });
}

void Cluster::schedule_fault() {
  at(uniform(50, 1200), [this] {
    if (!faults_on_) return;
    ++stats_.faults;
    if (!calm_)
      random_fault();
    else if (chance(0.2))
      crash_coordinator();
    schedule_fault();
  });
}

void Cluster::note_trouble(Worker& w, int64_t until) {
  w.trouble_until = std::max(w.trouble_until, until);
}

std::vector<Cluster::Worker*> Cluster::running() const {
  std::vector<Worker*> out;
  for (const auto& [name, w] : workers_)
    if (w->agent) out.push_back(w.get());
  return out;
}

void Cluster::random_fault() {
  const std::vector<Worker*> up = running();
  std::vector<Rank*> ranks;
  for (Worker* w : up)
    for (Rank* r : live_ranks(*w)) ranks.push_back(r);
  const auto any_of = [this](const auto& all) {
    return all.empty()
               ? nullptr
               : all[static_cast<size_t>(uniform(0, std::ssize(all) - 1))];
  };
  const auto worker = [&] { return any_of(up); };
  const auto rank = [&] { return any_of(ranks); };
  const int64_t kind = uniform(0, 15);
  trace(fmt::format("fault {}", kind));
  switch (kind) {
    case 0:
    case 1:
    case 2:
      if (Rank* r = rank()) rank_fails(*r, kind / 2, kind == 2 ? 0 : 9, 0);
      break;
    case 3:
    case 4:
      if (Rank* r = rank()) {
        worlds_[r->generation]->stalled = true;
        (kind == 3 ? r->stopped : r->stuck) = true;
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
      if (coordinator_runs()) crash_coordinator();
      break;
    case 9:
      coordinator_frozen_until_ = now_ + uniform(100, 2500);
      if (later_random_.chance(0.3))
        at(later_random_.uniform(0, 2500), [this] { start_rival(); });
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
      if (chance(0.5))
        disk_full_ = !disk_full_;
      else if (up.size() > 1)
        send_away(*worker());
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

void Cluster::send_away(Worker& w) {
  if (chance(0.5)) {
    w.terminated = true;
    drive_worker(w, agent::Terminate{});
  } else if (coordinator_) {
    pb::Command c;
    c.set_kind(pb::Command::DRAIN);
    c.set_worker(w.name);
    ask(c);
  }
}

// `remesh mesh` with a random layout, or auto. A refusal does no harm.
void Cluster::ask_mesh() {
  if (!coordinator_) return;
  pb::Command c;
  c.set_kind(pb::Command::MESH);
  const auto degree = [this] { return chance(0.6) ? 1 : 2; };
  c.set_layout(chance(0.2) ? "auto"
                           : fmt::format("dp{},pp{},tp{},cp{}", uniform(1, 3),
                                         degree(), degree(), degree()));
  trace("mesh " + c.layout());
  asks_auto_ = c.layout() == "auto";
  ask(c);
}

// Ends all faults, restarts what is down, and adds workers.
void Cluster::heal() {
  trace("faults stop");
  faults_on_ = false;
  disk_full_ = false;
  outage_until_ = 0;
  repair_disk();
  partitioned_until_.clear();
  mute_until_.clear();
  deaf_until_.clear();
  reconnected_at_.clear();
  if (coordinator_ && coordinator_->ended()) {
    // Stopped on request; resume() is pending.
  } else if (!coordinator_ && !done_) {
    start_coordinator();
  }
  for (auto& [name, w] : workers_) {
    w->frozen_until = 0;
    start_worker(*w);
  }
  if (upgrades_) finish_upgrade();
  start_worker(add_worker());
  start_worker(add_worker());
  if (bad_hosts_.empty() && bad_link_.first.empty()) return;
  if (repaired_) bad_hosts_.clear();
  // Enough slots for every mesh of the job.
  for (int i = 0; i < 4; ++i) start_worker(add_worker());
}

// A worker that starts during a rolling upgrade may be of the next build; an
// upgraded worker stays upgraded.
void Cluster::upgrade(Worker& w) {
  if (!upgrades_ || w.build == "2") return;
  if (!faults_on_ || upgrade_random_.below(2) == 0) w.build = "2";
}

// At the end all workers are of one build, so that the slots suffice.
void Cluster::finish_upgrade() {
  for (auto& [name, w] : workers_)
    if (w->agent && w->build != "2") crash_worker(*w);
}

}  // namespace remesh::sim
