// Runs with one bad place, a worker or a host, beside good ones, that ends no
// job and costs it little: with no other faults than a coordinator that dies.
#include <fmt/format.h>

#include <algorithm>

#include "proto/base/exit_code.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"

namespace remesh::sim {
namespace {

// Failures of the bad place, however long the run is. A coordinator with
// another clock may end a cordon at once.
constexpr int64_t kMostFailures = 8;
constexpr int64_t kMoreFailures = 4;
constexpr int64_t kMostHangs = 4;  // one of them after each end of a cordon

}  // namespace

void Cluster::choose_bad_place() {
  Random random(options_.seed * 0x9FB21C651E98DF25ULL + 4);
  if (random.below(16) != 0 || calm_) return;
  make_calm();
  hostile_ = 0;
  job_.mutable_train()->set_steps(200 + random.below(400));
  options_.fault_ms += 60'000;
  const int64_t kind = random.below(5);
  workers_a_host_ = kind == 0 ? 2 : 1;
  const int64_t good = workers_a_host_ * (1 + random.below(3));
  num_workers_ = good;
  if (kind == 0) {
    // The first worker of a host, or the second.
    bad_place_ = fmt::format("w{}", random.below(good));
    bad_workers_[bad_place_] = random.below(2) == 0 ? Bad::kCrash : Bad::kSpawn;
    return;
  }
  // A host that joins later.
  bad_place_ = fmt::format("h{}", good);
  all_wait_ = random.below(2) == 0;
  bad_hosts_[bad_place_] = kind == 1   ? Bad::kHangs
                           : kind == 2 ? Bad::kDiesLater
                           : kind == 3 ? Bad::kUnreachable
                                       : Bad::kCrash;
  const int64_t joins_ms = 1000 + random.below(4000);
  at(joins_ms, [this] { start_worker(add_worker()); });
  if (kind != 4) return;
  // The good hosts are away when the bad one is tried again.
  const int64_t away_ms = 1000 + random.below(90'000);
  at(joins_ms + random.below(20'000), [this, away_ms] {
    for (auto& [name, w] : workers_) {
      if (!w->agent || w->host == bad_place_) continue;
      end_daemon(*w);
      at(away_ms, [this, name = name] { start_worker(*workers_[name]); });
    }
  });
}

// Whether a mesh fits on the good workers alone, were they all there.
bool Cluster::good_workers_suffice() const {
  pb::JobStatus good;
  for (const auto& [name, w] : workers_)
    if (bad_of(w->host, name) == Bad::kNone)
      good.add_workers()->set_slots(w->slots);
  return slots_suffice(good);
}

// Once a step was made, since a job that has made none may be at fault itself,
// and of a bad link either end. A job that needs the bad place may end.
void Cluster::check_bad_place(const pb::EventRecord& e) {
  if (bad_place_.empty()) return;
  if (e.event() == "job_failed" && !metrics_.empty() && good_workers_suffice())
    violated(bad_place_ + " ended the job: " + e.cause());
  // The only worker of a host that the coordinator knows is its host.
  const auto all_of = [this](const std::string& host) {
    const pb::JobStatus known = coordinator_->status();
    return std::ranges::all_of(known.workers(), [&](const auto& w) {
      return (w.host() == host) == (w.name() == bad_place_);
    });
  };
  if (e.event() == "host_cordoned" && e.host() != bad_place_ &&
      e.worker() != bad_place_ && !metrics_.empty() && !all_of(e.host()) &&
      e.detail().find("link to " + bad_place_ + " ") == std::string::npos)
    violated("{} is blamed for {}: {}", e.host(), bad_place_,
             e.ShortDebugString());
  if (e.event() != "failure") return;
  // A job that cannot do without it tries again and again.
  const pb::JobStatus status = coordinator_->status();
  pb::JobStatus good;
  for (const pb::WorkerStatus& w : status.workers())
    if (bad_of(w.host(), w.name()) == Bad::kNone) *good.add_workers() = w;
  if (!slots_suffice(good)) return;
  const bool hang = e.cause().find("no progress") != std::string::npos;
  const auto lives = static_cast<int64_t>(status.epoch());
  if (++place_failures_ > kMostFailures + kMoreFailures * lives ||
      (hang && ++hangs_ > kMostHangs + lives))
    violated("{} failed {} times and is still used: {}", bad_place_,
             place_failures_, e.cause());
}

Cluster::Bad Cluster::bad_of(const std::string& host,
                             const std::string& worker) const {
  if (const auto it = bad_workers_.find(worker); it != bad_workers_.end())
    return it->second;
  const auto it = bad_hosts_.find(host);
  return it == bad_hosts_.end() ? Bad::kNone : it->second;
}

// Whether the ranks of the world never connect because of the worker: they hang
// or, if their hosts cannot reach each other, all of them end.
bool Cluster::connects_badly(Worker& w, World& world) {
  const auto& places = world.assignment.ranks();
  const auto unreachable =
      std::count_if(places.begin(), places.end(), [&](auto& p) {
        return bad_of(workers_[p.worker()]->host, p.worker()) ==
               Bad::kUnreachable;
      });
  if (unreachable > 0 && unreachable < places.size()) {
    for (auto& [rank, r] : w.ranks)
      rank_fails(r, kExitWorld, 0, 1 + host_random_.below(300));
    return true;
  }
  if (bad_of(w.host, w.name) != Bad::kHangs) return false;
  world.stalled = world.hangs = true;
  for (auto& [rank, r] : w.ranks) r.stuck = true;
  return true;
}

}  // namespace remesh::sim
