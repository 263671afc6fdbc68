// Several hosts, and the faults of the network between them.
#include <fmt/format.h>

#include <algorithm>

#include "tests/soak/soak.h"

namespace remesh::soak {
namespace {

constexpr size_t kMostWorkers = 5;  // on one machine
// At most; about half of them are long enough to be taken for a death.
constexpr uint64_t kCutOffMs = 2 * kDeadAfterMs;
constexpr uint64_t kPairCutOffMs = 2 * kDeadAfterMs;
constexpr uint64_t kFullMs = 4'000;
constexpr double kLostShare = 0.05;
constexpr int64_t kSlowBits = 30'000'000;
constexpr int kBadFor = 2;  // faults
const char* const kPort = ":5710";

}  // namespace

size_t Soak::most_workers() const {
  return network_ ? static_cast<size_t>(options_.hosts) : kMostWorkers;
}

void Soak::start_coordinator(const std::vector<std::string>& more) {
  if (!network_) {
    cluster_.start_coordinator(more);
    return;
  }
  // The workers find theirs in the run directory, too.
  (void)cluster_.remesh(
      {"key", "new", "coordinator", "head", cluster_.run_dir()});
  std::vector<std::string> args = {"--bind",
                                   std::string("tcp://0.0.0.0") + kPort,
                                   "--advertise", testing::Network::address(0)};
  args.insert(args.end(), more.begin(), more.end());
  cluster_.start_coordinator(args, network_->on(0));
}

int Soak::free_host() const {
  for (int h = 1; h <= options_.hosts; ++h)
    if (std::none_of(hosts_.begin(), hosts_.end(),
                     [&](const auto& at) { return at.second == h; }))
      return h;
  return options_.hosts;
}

int Soak::host_of(const std::string& worker) const {
  const auto it = hosts_.find(worker);
  return it == hosts_.end() ? 0 : it->second;
}

void Soak::start_worker(const std::string& name) {
  live_.insert(name);
  if (!network_) {
    cluster_.start_worker({.name = name});
    return;
  }
  if (!hosts_.contains(name)) hosts_[name] = free_host();
  const int host = hosts_[name];
  cluster_.start_worker({.name = name,
                         .more = {"--interface", "10.77.0.0/24", "--host-name",
                                  fmt::format("host{}", host)},
                         .prefix = network_->on(host)});
}

// Whether every finished step is on more than one host, so that the loss of one
// loses none.
bool Soak::survives_a_host() {
  if (!network_) return true;
  const testing::Json s = cluster_.status();
  if (!s.is_object() || !s.contains("kept_state")) return false;
  const testing::Json& kept = s["kept_state"];
  return kept.is_object() && kept.contains("needed_hosts") &&
         kept["needed_hosts"].empty();
}

bool Soak::hit_network(Kind kind, Waiting* wait) {
  const std::string name = some_worker();
  const int host = host_of(name);
  if (host == 0) return false;
  wait->change = Waiting::Change::kPerhaps;
  if (kind == Kind::kLossy || kind == Kind::kSlow) {
    wait->change = Waiting::Change::kNone;
    network_bad_for_ = kBadFor;
    if (kind == Kind::kSlow) return network_->set_rate(host, kSlowBits).ok();
    bool done = true;
    for (int other = 0; other <= options_.hosts; ++other)
      if (other != host)
        done = done && network_->set_loss(host, other, kLostShare).ok() &&
               network_->set_loss(other, host, kLostShare).ok();
    return done;
  }
  if (!survives_a_host()) return false;
  ++hosts_lost_;
  if (kind == Kind::kCutOff) {
    network_->set_link(host, false);
    testing::sleep_ms(static_cast<int64_t>(random(kCutOffMs)));
    network_->set_link(host, true);
    return true;
  }
  int from = host, to = 0;
  if (kind == Kind::kPairCutOff) {
    for (const std::string& other : live_)
      if (other != name) to = host_of(other);
  } else if (random(2) == 0) {
    std::swap(from, to);
  }
  bool done = network_->set_loss(from, to, 1).ok();
  if (kind == Kind::kPairCutOff) done = network_->set_loss(to, from, 1).ok();
  testing::sleep_ms(static_cast<int64_t>(
      random(kind == Kind::kPairCutOff ? kPairCutOffMs : kCutOffMs)));
  (void)network_->set_loss(from, to, 0);
  (void)network_->set_loss(to, from, 0);
  return done;
}

bool Soak::fill_run_folder() {
  run_disk_->fill(0);
  testing::sleep_ms(static_cast<int64_t>(random(kFullMs)));
  run_disk_->free();
  return true;
}

void Soak::repair_network() {
  network_bad_for_ = 0;
  if (network_) network_->heal();
}

}  // namespace remesh::soak
