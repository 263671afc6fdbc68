// bench_elastic: from a fault to the next finished step, with real processes on
// this machine.
//
// Times of steps are those of metrics.jsonl, taken by rank 0 when its step is
// committed; the fault's is taken right before kill(2) (or before the command
// or program that makes the change is started).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "bench/elastic/trials.h"
#include "proto/base/text.h"

namespace remesh::bench {
namespace {

constexpr int64_t kPeerMs = 300'000;

struct Arguments {
  int trials = 10;
  int workers = 4;
  int interval = 1;
  int dead_after_ms = 2000;
  std::vector<std::string> rows;
  std::string peer;
};

struct Row {
  const char* name;
  const char* text;
  bool (Bench::*run)(int, Trial*);
};

const std::vector<Row>& fault_rows() {
  static const std::vector<Row> rows = {
      {"rank", "rank killed", &Bench::rank_killed},
      {"worker", "worker killed", &Bench::worker_killed},
      {"stopped", "worker SIGSTOPped", &Bench::worker_stopped},
      {"join", "join", &Bench::join},
      {"drain", "drain", &Bench::drain}};
  return rows;
}

constexpr const char* kCoordinatorRow = "coordinator";

struct Summary {
  double median = -1;
  double worst = -1;
};

Summary summarize(std::vector<double> v) {
  if (v.empty()) return {};
  std::sort(v.begin(), v.end());
  return {v[v.size() / 2], v.back()};
}

template <typename T>
Summary summarize(const std::vector<Trial>& trials, T Trial::*field) {
  std::vector<double> v;
  for (const Trial& t : trials)
    if (static_cast<double>(t.*field) >= 0)
      v.push_back(static_cast<double>(t.*field));
  return summarize(std::move(v));
}

void print_row(const Row& row, const std::vector<Trial>& trials) {
  const Summary next = summarize(trials, &Trial::recovery_s);
  const Summary standing = summarize(trials, &Trial::standing_s);
  const Summary lost = summarize(trials, &Trial::lost_steps);
  fmt::print(
      "{:<20} {:>6} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f} {:>6.0f} "
      "{:>6.0f}   {:.3f} + {:.3f} + {:.3f}\n",
      row.text, trials.size(), next.median, next.worst, standing.median,
      standing.worst, lost.median, lost.worst,
      summarize(trials, &Trial::noticed_s).median,
      summarize(trials, &Trial::planned_s).median,
      summarize(trials, &Trial::first_step_s).median);
  std::fflush(stdout);
}

// Median and worst of torchrun's recoveries, as the peer program prints them.
Summary run_peer(const std::string& file) {
  const std::string python = "/usr/bin/python3";
  if (testing::run_program({python, "-c", "import torch"}, 60'000).exit.code !=
      0) {
    fmt::print("torchrun: {} has no torch; left out\n", python);
    return {};
  }
  const testing::Finished f =
      testing::run_program({python, file, "drive"}, kPeerMs);
  std::vector<double> seconds;
  for (const std::string& line : testing::split_lines(f.output))
    if (line.starts_with("recovery "))
      seconds.push_back(std::atof(line.c_str() + 9));
  const Summary s = summarize(seconds);
  if (seconds.empty()) {
    fmt::print("torchrun: {} printed no recovery:\n{}", file,
               testing::tail(f.output, 5));
  } else {
    fmt::print("{:<20} {:>6} {:>9.3f} {:>9.3f}\n", "torchrun rank killed",
               seconds.size(), s.median, s.worst);
  }
  return s;
}

bool wanted(const Arguments& a, const std::string& row) {
  return a.rows.empty() ||
         std::find(a.rows.begin(), a.rows.end(), row) != a.rows.end();
}

bool run_coordinator_row(const Arguments& a, Bench* bench) {
  std::vector<double> around;
  std::vector<double> before;
  std::vector<double> typical;
  for (int i = 0; i < a.trials; ++i) {
    GapTrial t;
    if (!bench->coordinator_killed(i, &t)) return false;
    around.push_back(t.longest_s);
    before.push_back(t.longest_before_s);
    typical.push_back(t.median_s);
  }
  const Summary s = summarize(around);
  const Summary b = summarize(before);
  fmt::print(
      "\ncoordinator killed, {} trials: longest time between two finished "
      "steps in the\n2 s after the kill: median {:.3f} s, worst {:.3f} s; in "
      "the 2 s before it: median\n{:.3f} s, worst {:.3f} s; median step "
      "{:.3f} s. {}\n",
      a.trials, s.median, s.worst, b.median, b.worst, summarize(typical).median,
      s.median <= 1.5 * b.median ? "No step was delayed."
                                 : "STEPS WERE DELAYED.");
  return true;
}

void print_head(const Arguments& a, const Bench& bench) {
  fmt::print(
      "bench_elastic: {} workers with a rank each on {} cores, 0.1 M "
      "parameters, median\nstep {:.3f} s, checkpoint every {} step{}, "
      "elastic.dead_after_ms {}, {} trials a row\n\n",
      a.workers, std::thread::hardware_concurrency(), bench.median_step_s(),
      a.interval, a.interval == 1 ? "" : "s", a.dead_after_ms, a.trials);
  fmt::print("{:<20} {:>6} {:>19} {:>19} {:>13}\n", "", "",
             "fault to next step", "no step finished", "lost steps");
  fmt::print("{:<20} {:>6} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6}   {}\n", "fault",
             "trials", "median", "worst", "median", "worst", "med.", "worst",
             "ended + planned + first step");
  std::fflush(stdout);
}

void print_notes() {
  fmt::print(
      "\nSeconds. The next step is the first one finished on the new mesh that "
      "was not\nfinished before; steps computed again count into its time. "
      "For join and drain the\nold mesh goes on stepping: what stands still is "
      "the second pair of columns. A join\nholds the start of the worker's "
      "process and elastic.join_window_ms (200 here).\nThe last column splits "
      "the first median: until the old generation was ended\neverywhere, until "
      "the new one was planned, until its first new step. A save takes longer "
      "than "
      "so small a step: some are\nskipped, and more steps are lost than the "
      "interval says.\n");
}

int run(const Arguments& a) {
  const testing::TinyData data;
  double rank_median = -1;
  {
    Bench bench(data.path(), a.workers, a.interval, a.dead_after_ms);
    print_head(a, bench);
    for (const Row& row : fault_rows()) {
      if (!wanted(a, row.name)) continue;
      std::vector<Trial> trials;
      for (int i = 0; i < a.trials; ++i) {
        Trial t;
        if (!(bench.*row.run)(i, &t)) return EXIT_FAILURE;
        trials.push_back(t);
      }
      print_row(row, trials);
      if (std::string(row.name) != "rank") continue;
      rank_median = summarize(trials, &Trial::recovery_s).median;
    }
    const std::string parts = bench.start_parts();
    if (wanted(a, kCoordinatorRow) && !run_coordinator_row(a, &bench))
      return EXIT_FAILURE;
    if (!parts.empty())
      fmt::print("\nstart of a rank, the last one: {}\n", parts);
  }
  print_notes();
  if (a.peer.empty()) return EXIT_SUCCESS;
  fmt::print("\n");
  const Summary peer = run_peer(a.peer);
  if (peer.median > 0 && rank_median > 0)
    fmt::print("torchrun / remesh, rank killed, medians: {:.1f}\n",
               peer.median / rank_median);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  CLI::App app("From a fault to the next finished step.");
  remesh::bench::Arguments a;
  app.add_option("--trials", a.trials, "Faults a row")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--workers", a.workers, "Workers, a rank each")
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  app.add_option("--interval", a.interval, "Steps between checkpoints")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--dead-after-ms", a.dead_after_ms, "elastic.dead_after_ms")
      ->capture_default_str();
  app.add_option("--rows", a.rows, "Only these")
      ->delimiter(',')
      ->check(CLI::IsMember(
          {"rank", "worker", "stopped", "join", "drain", "coordinator"}));
  app.add_option("--peer", a.peer,
                 "Python program that measures torchrun: run with 'drive', it "
                 "prints lines \"recovery X s\"")
      ->check(CLI::ExistingFile);
  CLI11_PARSE(app, argc, argv);
  return remesh::bench::run(a);
}
