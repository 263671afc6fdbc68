// cluster_sim: many simulated clusters, one per seed. Prints a summary, and for
// a failing seed the violated invariant and how to reproduce it. The top of
// cluster.h says what a clean seed does not prove.
#include <fmt/format.h>
#include <google/protobuf/stubs/logging.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "tests/sim/cluster.h"

namespace {
// At most one in this many seeds may be inconclusive.
constexpr uint64_t kJudged = 50;
}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Runs simulated clusters: real coordinator and worker cores, simulated "
      "network, clocks, processes and faults. Exit code 1 when an invariant is "
      "violated.\n\nExample: cluster_sim --seeds 100000\n"
      "         cluster_sim --first 4711 --seeds 1 --trace"};
  uint64_t first = 1;
  uint64_t seeds = 1000;
  unsigned jobs = std::max(1U, std::thread::hardware_concurrency());
  uint64_t stop_at = 20;
  bool trace = false;
  std::string known;
  app.add_option("--first", first, "first seed")->capture_default_str();
  app.add_option("--seeds", seeds, "how many")->capture_default_str();
  app.add_option("--jobs", jobs, "threads")->capture_default_str();
  app.add_option("--stop-at", stop_at, "end after so many violated seeds")
      ->capture_default_str();
  app.add_flag("--trace", trace, "print what happens");
  bool reword = false;
  app.add_flag("--reword", reword,
               "run each seed again with other sentences in the journal and in "
               "messages: the decisions must be the same");
  app.add_option("--known", known,
                 "file with seeds to run as well, one a line");
  CLI11_PARSE(app, argc, argv);
  // Hostile messages have strings that are not UTF-8, each of them a line.
  google::protobuf::SetLogHandler(nullptr);
  if (trace) jobs = 1;

  // The known seeds, then consecutive ones.
  std::vector<uint64_t> known_seeds;
  std::ifstream file(known);
  for (std::string line; std::getline(file, line);)
    if (!line.empty() && line[0] != '#')
      known_seeds.push_back(std::strtoull(line.c_str(), nullptr, 10));
  if (!known.empty() && known_seeds.empty()) {
    fmt::print(stderr, "{}: no seeds\n", known);
    return remesh::kExitUsage;
  }
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> clean{0};
  std::atomic<uint64_t> bad{0};
  std::atomic<uint64_t> inconclusive{0};
  remesh::sim::SimStats total;
  std::mutex mutex;
  const double began = remesh::unix_seconds();
  const auto work = [&] {
    while (true) {
      const uint64_t i = next.fetch_add(1);
      if (i >= known_seeds.size() + seeds || bad >= stop_at) return;
      const uint64_t seed = i < known_seeds.size()
                                ? known_seeds[i]
                                : first + i - known_seeds.size();
      remesh::sim::Cluster cluster({.seed = seed, .trace = trace});
      std::string violation = cluster.run();
      if (reword && violation.empty()) {
        remesh::sim::Cluster other({.seed = seed, .reword = true});
        violation = other.run();
        if (violation.empty() && other.stats().digest_of_decisions !=
                                     cluster.stats().digest_of_decisions)
          violation =
              "a sentence has decided something: seed " + std::to_string(seed);
      }
      const std::lock_guard lock(mutex);
      total.steps += cluster.stats().steps;
      total.faults += cluster.stats().faults;
      total.generations += cluster.stats().generations;
      total.messages += cluster.stats().messages;
      total.hostile += cluster.stats().hostile;
      total.from_memory += cluster.stats().from_memory;
      total.lost_steps += cluster.stats().lost_steps;
      total.gaps += cluster.stats().gaps;
      total.handoffs += cluster.stats().handoffs;
      total.end_ms += cluster.stats().end_ms;
      // A sum, because threads finish seeds in any order.
      total.digest += cluster.stats().digest;
      total.digest_of_decisions += cluster.stats().digest_of_decisions;
      if (cluster.stats().inconclusive) {
        ++inconclusive;
      } else if (violation.empty()) {
        ++clean;
      } else {
        ++bad;
        fmt::print(
            "VIOLATED {}\n  see: cluster_sim --first {} --seeds 1 --trace\n",
            violation, seed);
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < jobs; ++i) threads.emplace_back(work);
  for (auto& t : threads) t.join();
  fmt::print(
      "{} seeds clean, {} violated, {} inconclusive: {} faults, {} generations "
      "({} from memory, {} by handoff), {} steps, {} made again, {} gaps in "
      "their record, {} messages, {} hostile ones, {:.1f} simulated hours in "
      "{:.1f} s\n",
      clean.load(), bad.load(), inconclusive.load(), total.faults,
      total.generations, total.from_memory, total.handoffs, total.steps,
      total.lost_steps, total.gaps, total.messages, total.hostile,
      static_cast<double>(total.end_ms) / 3.6e6,
      remesh::unix_seconds() - began);
  fmt::print("digest of all actions {:016x}, of decisions alone {:016x}\n",
             total.digest, total.digest_of_decisions);
  const uint64_t all = clean + bad + inconclusive;
  const bool judged = inconclusive * kJudged <= all || all < kJudged;
  if (!judged)
    fmt::print("too many inconclusive seeds; allowed: 1 in {}\n", kJudged);
  return bad == 0 && judged ? 0 : 1;
}
