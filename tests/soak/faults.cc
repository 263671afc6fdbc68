// The faults themselves.
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <array>

#include "proto/base/clock.h"
#include "tests/soak/soak.h"

namespace remesh::soak {
namespace {

constexpr int64_t kRanksMs = 3'000;
constexpr uint64_t kAwayMs = 400;   // absence of a killed daemon
constexpr uint64_t kPauseMs = 900;  // pause of a rank
constexpr int64_t kSilentMs = kDeadAfterMs + 700;
constexpr int64_t kRoomLeft = 64 << 10;  // on a full disk
// The coordinator of the last part of the run is not killed, so that its memory
// can be observed over many faults.
constexpr double kCoordinatorShare = 0.6;
const char* const kAnchor =
    "w1";  // likewise, a worker whose memory is observed

struct Share {
  Kind kind;
  const char* name;
  int weight;
  bool keeps_mesh;
  bool hosts_only = false;
};

constexpr std::array kShares = {
    Share{Kind::kRankKilled, "rank killed", 8, true},
    Share{Kind::kWorkerKilled, "worker killed, returns", 6, true},
    Share{Kind::kHostLost, "worker and memory lost", 6, true},
    Share{Kind::kHostsLost, "two of them at once", 1, false},
    Share{Kind::kCoordinatorKilled, "coordinator killed", 4, true},
    Share{Kind::kRankStopped, "rank stopped", 2, true},
    Share{Kind::kRankPaused, "rank paused", 2, true},
    Share{Kind::kWorkerStopped, "worker silent, returns", 1, true},
    Share{Kind::kDrain, "drain", 4, true},
    Share{Kind::kJoin, "join", 4, true},
    Share{Kind::kScale, "scale", 3, false},
    Share{Kind::kMesh, "mesh requested", 4, false},
    Share{Kind::kDiskFull, "disk full", 2, true},
    Share{Kind::kCutOff, "host cut off", 3, true, true},
    Share{Kind::kOneWay, "host cut off one way", 3, true, true},
    Share{Kind::kPairCutOff, "two hosts cut off", 2, true, true},
    Share{Kind::kLossy, "packets lost", 2, true, true},
    Share{Kind::kSlow, "link slow", 2, true, true},
    Share{Kind::kRunFolderFull, "run directory full", 2, true, true}};

const Share& share_of(Kind kind) {
  return *std::find_if(kShares.begin(), kShares.end(),
                       [&](const Share& s) { return s.kind == kind; });
}

}  // namespace

const char* name_of(Kind kind) { return share_of(kind).name; }

bool Soak::possible(Kind kind, int number) const {
  if (options_.keep_mesh && !share_of(kind).keeps_mesh) return false;
  if (options_.hosts == 0 && share_of(kind).hosts_only) return false;
  const size_t others = live_.size() - live_.count(kAnchor);
  const bool spare = live_.size() > least_workers();
  switch (kind) {
    case Kind::kCoordinatorKilled:
      return number < options_.faults * kCoordinatorShare;
    case Kind::kHostLost:
    case Kind::kWorkerStopped:
      return hosts_lost_ == 0 && others > 0 && spare;
    case Kind::kHostsLost:
      return hosts_lost_ == 0 && others > 1 && spare;
    case Kind::kWorkerKilled:
      return others > 0;
    case Kind::kDrain:
      return others > 0 && spare;
    case Kind::kJoin:
      return live_.size() < most_workers();
    case Kind::kDiskFull:
      return disk_.mounted() && disk_full_for_ == 0;
    case Kind::kCutOff:
    case Kind::kOneWay:
      return hosts_lost_ == 0 && spare;
    case Kind::kPairCutOff:
      return hosts_lost_ == 0 && live_.size() > 2;
    case Kind::kLossy:
    case Kind::kSlow:
      return network_bad_for_ == 0;
    case Kind::kRunFolderFull:
      return run_disk_ != nullptr && run_disk_->mounted();
    default:
      return true;
  }
}

size_t Soak::least_workers() const {
  return options_.keep_mesh ? kKeptSlots : 2;
}

Kind Soak::pick(int number) {
  while (true) {
    int all = 0;
    for (const Share& s : kShares) all += s.weight;
    auto at = static_cast<int>(random(static_cast<uint64_t>(all)));
    size_t i = 0;
    while (at >= kShares[i].weight) at -= kShares[i++].weight;
    if (possible(kShares[i].kind, number)) return kShares[i].kind;
  }
}

bool Soak::inject(Kind kind, Waiting* wait) {
  using Change = Waiting::Change;
  switch (kind) {
    case Kind::kRankKilled:
    case Kind::kRankStopped:
    case Kind::kRankPaused:
      return hit_rank(kind, wait);
    case Kind::kWorkerKilled:
    case Kind::kHostLost:
    case Kind::kWorkerStopped:
      return hit_worker(kind, wait);
    case Kind::kHostsLost:
      lose_two_hosts();
      wait->change = Change::kPerhaps;
      return true;
    case Kind::kCoordinatorKilled:
      cluster_.coordinator().kill(SIGKILL);
      cluster_.coordinator().wait_ms(kRanksMs);
      testing::sleep_ms(static_cast<int64_t>(random(kAwayMs)));
      start_coordinator();
      wait->change = Change::kNone;
      return true;
    case Kind::kDiskFull:
      disk_.fill(kRoomLeft);
      disk_full_for_ = 2;
      wait->change = Change::kNone;
      return true;
    case Kind::kDrain:
    case Kind::kJoin:
    case Kind::kScale:
    case Kind::kMesh:
      wait->change = Change::kPerhaps;
      return change_plan(kind);
    case Kind::kRunFolderFull:
      wait->change = Change::kNone;
      return fill_run_folder();
    case Kind::kCutOff:
    case Kind::kOneWay:
    case Kind::kPairCutOff:
    case Kind::kLossy:
    case Kind::kSlow:
      return hit_network(kind, wait);
  }
  return false;
}

// Those of the newest generation: a host that is cut off may still have older
// ones, of which nobody takes notice.
std::vector<testing::Cluster::Rank> Soak::newest_ranks() {
  std::vector<testing::Cluster::Rank> ranks = cluster_.ranks();
  int64_t newest = 0;
  for (const auto& r : ranks) newest = std::max(newest, r.generation);
  std::erase_if(ranks,
                [newest](const auto& r) { return r.generation < newest; });
  return ranks;
}

bool Soak::hit_rank(Kind kind, Waiting* wait) {
  std::vector<testing::Cluster::Rank> ranks;
  testing::wait_until(
      [&] {
        ranks = newest_ranks();
        return !ranks.empty();
      },
      kRanksMs);
  if (ranks.empty()) return false;
  const pid_t pid = ranks[random(ranks.size())].pid;
  if (kind == Kind::kRankKilled) {
    testing::send_signal(pid, SIGKILL);
    return true;
  }
  testing::send_signal(pid, SIGSTOP);
  if (kind == Kind::kRankStopped) return true;
  testing::sleep_ms(static_cast<int64_t>(random(kPauseMs)));
  testing::send_signal(pid, SIGCONT);
  wait->change = Waiting::Change::kNone;
  return true;
}

std::string Soak::some_worker() {
  std::vector<std::string> names;
  for (const std::string& name : live_)
    if (name != kAnchor && !stopped_.contains(name)) names.push_back(name);
  return names.empty() ? "" : names[random(names.size())];
}

bool Soak::has_rank(const std::string& worker) {
  const auto ranks = newest_ranks();
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](const auto& r) { return r.worker == worker; });
}

bool Soak::hit_worker(Kind kind, Waiting* wait) {
  const std::string name = some_worker();
  if (name.empty()) return false;
  // The death of a spare changes nothing.
  if (!has_rank(name)) wait->change = Waiting::Change::kPerhaps;
  if (kind == Kind::kWorkerStopped) {
    if (!survives_a_host()) return false;
    cluster_.worker(name).kill(SIGSTOP);
    stopped_.insert(name);
    ++hosts_lost_;
    testing::sleep_ms(kSilentMs);
    return true;
  }
  if (kind == Kind::kHostLost) {
    if (!survives_a_host()) return false;
    lose_host(name);
    // A new host, sometimes of the same name.
    if (random(3) != 0) start_worker(random(2) == 0 ? name : new_name());
    return true;
  }
  cluster_.worker(name).kill(SIGKILL);
  cluster_.worker(name).wait_ms(kRanksMs);
  testing::sleep_ms(static_cast<int64_t>(random(kAwayMs)));
  start_worker(name);
  return true;
}

void Soak::lose_host(const std::string& name) {
  ++hosts_lost_;
  live_.erase(name);
  leaving_.erase(name);
  cluster_.lose_host(name);
  hosts_.erase(name);
}

void Soak::lose_two_hosts() {
  windows_.push_back({.from = unix_seconds(), .to = -1});
  for (int i = 0; i < 2; ++i) lose_host(some_worker());
  while (live_.size() < least_workers()) start_worker(new_name());
}

bool Soak::change_plan(Kind kind) {
  std::vector<std::string> command;
  if (kind == Kind::kJoin) {
    start_worker(new_name());
    return true;
  }
  if (kind == Kind::kDrain) {
    const std::string name = some_worker();
    if (name.empty()) return false;
    command = {"drain", name};
    live_.erase(name);
    leaving_.insert(name);
  } else if (kind == Kind::kScale) {
    const size_t slots = random(live_.size() + 1);
    command = {"scale", slots == 0 ? "all" : std::to_string(slots)};
  } else {
    constexpr std::array kLayouts = {"dp2",     "dp1,tp2", "pp2",
                                     "dp2,tp2", "pp2,tp2", "auto"};
    command = {"mesh", kLayouts[random(kLayouts.size())]};
  }
  command.push_back(cluster_.run_dir());
  // A mesh that does not fit is refused.
  const bool done = cluster_.remesh(command).exit.code == 0;
  if (!done && kind == Kind::kDrain) {
    live_.insert(command[1]);
    leaving_.erase(command[1]);
  }
  return done;
}

}  // namespace remesh::soak
