// Sends hostile messages to the port of a real coordinator while it trains:
// from strangers, of whom nothing is heard, and from somebody with the key of a
// worker, whose messages are judged. Then a crowd keeps connections open
// without saying anything that counts, and scans the ports of the machine. The
// losses of the runs must be those of a calm one.
//
//   siege [--messages N] [--connections N] [--scan]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/median.h"
#include "proto/base/process.h"
#include "proto/wire/channel.h"
#include "proto/wire/key_choice.h"
#include "tests/fuzz/hostile/crowd.h"
#include "tests/sim/hostile.h"
#include "tests/testing/cluster.h"

namespace remesh {
namespace {

using testing::Cluster;
using testing::Json;

constexpr int64_t kEndMs = 300'000;
constexpr size_t kClients = 32;
constexpr int64_t kMaxMemoryKiB = 256 << 10;

std::string address_of(const Cluster& cluster) {
  const std::string file =
      testing::read_whole(cluster.run_dir() + "/coordinator.addr");
  return file.substr(0, file.find('\n'));
}

// The most memory that the process ever had.
int64_t peak_kib(pid_t pid) {
  std::ifstream in(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("VmHWM:"))
      return std::strtoll(line.c_str() + 6, nullptr, 10);
  return 0;
}

enum class Siege { kNone, kStrangers, kMember, kCrowd };

struct Options {
  int64_t messages = 5'000;
  size_t connections = 500;
  bool scan = false;  // all ports of this machine
};

// Several peers, each with a connection of its own.
class Besiegers {
 public:
  Besiegers(const Cluster& cluster, Siege siege)
      : address_(address_of(cluster)), siege_(siege) {
    auto keys =
        wire::choose_keys({.run = cluster.run_dir(), .member = "worker"});
    CHECK(keys.ok() && *keys);
    keys_ = **keys;
    for (size_t i = 0; i < kClients; ++i) connect();
  }

  // What an attacker can know: who is there, and in which generation.
  void look_at(const Json& status) {
    if (!status.is_object() || !status.contains("coordinator") ||
        !status["coordinator"].is_object())
      return;
    overheard_.generation = status.value("generation", int64_t{0});
    overheard_.epoch = status["coordinator"].value("epoch", uint64_t{0});
    overheard_.alive.clear();
    for (const Json& w : status["workers"])
      overheard_.alive.push_back(
          {w.value("name", ""),
           std::stoull(w.value("incarnation", std::string("1")))});
  }

  void send() {
    pb::Envelope out;
    const core::Input input = sim::hostile_input(rng_, overheard_);
    if (const auto* m = std::get_if<core::MessageReceived>(&input))
      out = m->message;
    else if (const auto* c = std::get_if<core::CommandReceived>(&input))
      *out.mutable_command() = c->command;
    // Some thousand empty objects in a few kilobytes.
    if (rng_() % 200 == 0)
      while (out.mutable_report()->ranks_size() < 200'000)
        out.mutable_report()->add_ranks();
    // As large as a message may be.
    if (rng_() % 100 == 0)
      out.mutable_report()->add_damaged(
          std::string(wire::kMaxRequestBytes - 4096, 'x'));
    if (rng_() % 500 == 0) connect();
    auto& client = clients_[rng_() % clients_.size()];
    if (!client->send(out)) testing::sleep_ms(1);
    while (client->receive()) {
    }
  }

 private:
  void connect() {
    std::optional<wire::ClientKeys> keys = keys_;
    // Without a key, or with one that nobody knows.
    if (siege_ == Siege::kStrangers) {
      keys->own = wire::new_key_pair();
      if (rng_() % 2 == 0) keys.reset();
    }
    auto made = wire::Client::connect(address_, keys);
    CHECK(made.ok());
    if (clients_.size() == kClients) clients_.erase(clients_.begin());
    clients_.push_back(std::move(made).value());
  }

  std::string address_;
  Siege siege_;
  wire::ClientKeys keys_;  // of a worker
  std::mt19937_64 rng_{1};
  sim::Overheard overheard_;
  std::vector<std::unique_ptr<wire::Client>> clients_;
};

struct Outcome {
  std::vector<std::string> losses;
  double step_s = 0;  // median
  int64_t peak_kib = 0;
  int64_t sent = 0;
  size_t told = 0;
};

// Holds the connections open until the job ends.
void crowd_in(Cluster& cluster, const Options& o, Outcome* out) {
  const std::string address = address_of(cluster);
  testing::Crowd crowd(std::stoi(address.substr(address.rfind(':') + 1)),
                       o.connections);
  while (cluster.coordinator().running()) {
    out->peak_kib =
        std::max(out->peak_kib, peak_kib(cluster.coordinator().pid()));
    crowd.step();
    if (o.scan) crowd.scan(2'000);
    testing::sleep_ms(50);
  }
  out->sent = crowd.opened();
  CHECK_MSG(crowd.most() == o.connections, "not all connected");
  std::printf("%zu connections held open, %lld opened; ", crowd.most(),
              static_cast<long long>(crowd.opened()));
  if (o.scan)
    std::printf("%lld ports tried, %lld answered; ",
                static_cast<long long>(crowd.scanned()),
                static_cast<long long>(crowd.answered()));
}

void send_messages(Cluster& cluster, Siege siege, const Options& o,
                   Outcome* out) {
  Besiegers besiegers(cluster, siege);
  while (out->sent < o.messages && cluster.coordinator().running()) {
    if (out->sent % 2000 == 0) besiegers.look_at(cluster.status());
    out->peak_kib =
        std::max(out->peak_kib, peak_kib(cluster.coordinator().pid()));
    besiegers.send();
    ++out->sent;
  }
}

double median_step_s(const std::vector<Json>& metrics) {
  std::vector<double> all;
  for (const Json& m : metrics) all.push_back(m.value("step_s", 0.0));
  CHECK(!all.empty());
  return median(std::move(all));
}

Outcome train(const std::string& data, Siege siege, const Options& o) {
  Outcome out;
  const std::string steps = std::to_string(200 + o.messages / 20);
  Cluster cluster(data, {{"train.steps", steps},
                         {"schedule.total_steps", steps},
                         {"model.dim", "32"}});
  auto& coordinator = cluster.start_coordinator();
  cluster.start_worker({.name = "w1", .slots = 3});
  if (siege != Siege::kNone) {
    CHECK(cluster.wait_for_step(1));
    if (siege == Siege::kCrowd)
      crowd_in(cluster, o, &out);
    else
      send_messages(cluster, siege, o, &out);
  }
  CHECK_MSG(coordinator.wait_ms(kEndMs), cluster.describe().c_str());
  CHECK_MSG(coordinator.exit().code == 0, cluster.describe().c_str());
  CHECK(cluster.worker("w1").wait_ms(kEndMs));
  out.told = cluster.events_named("report_refused").size();
  CHECK_MSG(cluster.events_named("mesh").size() == 1, "the job was disturbed");
  for (const std::string& line : cluster.metric_lines())
    out.losses.push_back(testing::raw_value(line, "loss"));
  out.step_s = median_step_s(cluster.metrics());
  return out;
}

const char* name_of(Siege kind) {
  return kind == Siege::kStrangers ? "strangers"
         : kind == Siege::kMember  ? "a member"
                                   : "a crowd";
}

int run(const Options& o) {
  raise_file_limit();
  const testing::TinyData data;
  const Outcome calm = train(data.path(), Siege::kNone, o);
  for (const Siege kind : {Siege::kStrangers, Siege::kMember, Siege::kCrowd}) {
    const bool member = kind == Siege::kMember;
    const Outcome siege = train(data.path(), kind, o);
    CHECK_MSG(siege.losses == calm.losses, "other losses than in a calm run");
    CHECK_MSG((siege.told > 0) == member,
              "who is judged, and who is not heard");
    CHECK_MSG(siege.peak_kib < kMaxMemoryKiB, "too much memory");
    std::printf(
        "siege by %s: %lld %s, %zu losses equal to a calm run's, step %.2f "
        "times its, coordinator at most %lld MiB\n",
        name_of(kind), static_cast<long long>(siege.sent),
        kind == Siege::kCrowd ? "connections" : "messages", siege.losses.size(),
        siege.step_s / calm.step_s,
        static_cast<long long>(siege.peak_kib >> 10));
  }
  return 0;
}

}  // namespace
}  // namespace remesh

int main(int argc, char** argv) {
  CLI::App app{
      "Sends hostile messages to a real coordinator while it trains, and "
      "compares the losses with a calm run's."};
  remesh::Options o;
  app.add_option("--messages", o.messages, "how many")->capture_default_str();
  app.add_option("--connections", o.connections, "of the crowd")
      ->capture_default_str();
  app.add_flag("--scan", o.scan, "the crowd tries all ports of this machine");
  CLI11_PARSE(app, argc, argv);
  return remesh::run(o);
}
