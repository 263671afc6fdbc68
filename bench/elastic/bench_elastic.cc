// bench_elastic: time from a fault or command to the next finished step, with
// real processes on this machine.
//
// The times of steps are those of metrics.jsonl, taken by rank 0 when it has
// computed the step; the time of a fault is taken right before kill(2), that of
// a command right before it is started. Lost steps are those that metrics.jsonl
// has and rank 0 makes again, according to its log.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bench/elastic/trials.h"
#include "bench/options.h"
#include "bench/targets.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "proto/base/text.h"

namespace remesh::bench {
namespace {

constexpr const char* kPython = "/usr/bin/python3";
constexpr int64_t kPeerMs = 300'000;
// Targets.
constexpr double kRecoveryS = 0.5;  // plus one step
constexpr double kPauseS = 0.5;
constexpr double kFoundSlackS = 0.3;  // a few reports
constexpr double kPeerRatio = 6;
constexpr double kGapRatio = 1.5;
constexpr double kJoinRatio = 2;  // worst pause over the median
// Between torchrun's looks at its workers: the default up to PyTorch 2.3, and
// since 2.4.
constexpr const char* kPeerIntervals[] = {"5", "0.1"};

struct Arguments {
  int trials = 20;
  BenchOptions bench;
  std::vector<std::string> rows;
  std::string peer;
  bool smoke = false;
};

constexpr const char* kCoordinatorRow = "coordinator";

// NaN: nothing was measured, which meets no target.
struct Summary {
  double median = std::nan("");
  double worst = std::nan("");
};

Summary summarize(const std::vector<double>& v) {
  if (v.empty()) return {};
  return {median(v), *std::max_element(v.begin(), v.end())};
}

template <typename T>
Summary summarize(const std::vector<Trial>& trials, T Trial::*field) {
  std::vector<double> v;
  for (const Trial& t : trials) {
    if (t.*field < 0) return {};  // one that was not measured may be the worst
    v.push_back(static_cast<double>(t.*field));
  }
  return summarize(v);
}

struct Outcome {
  Summary next;   // fault to next step
  Summary pause;  // no step finished
  Summary lost;
  Summary noticed, planned, first_step;  // parts of `next`
  double step_s = 0;
};

Outcome outcome_of(const std::vector<Trial>& trials, double step_s) {
  return {.next = summarize(trials, &Trial::recovery_s),
          .pause = summarize(trials, &Trial::pause_s),
          .lost = summarize(trials, &Trial::lost_steps),
          .noticed = summarize(trials, &Trial::noticed_s),
          .planned = summarize(trials, &Trial::planned_s),
          .first_step = summarize(trials, &Trial::first_step_s),
          .step_s = step_s};
}

void print_row(const char* text, size_t trials, const Outcome& o) {
  fmt::print(
      "{:<20} {:>6} {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} {:>5.0f} {:>6.3f}   "
      "{:.3f} + {:.3f} + {:.3f}\n",
      text, trials, o.next.median, o.next.worst, o.pause.median, o.pause.worst,
      o.lost.worst, o.step_s, o.noticed.median, o.planned.median,
      o.first_step.median);
  std::fflush(stdout);
}

// With the end of the line.
std::string peer_version() {
  return testing::run_program(
             {kPython, "-c", "import torch; print(torch.__version__)"}, kPeerMs)
      .output;
}

// torchrun's recoveries, which the peer program prints.
Summary run_peer(const std::string& file, const std::string& interval_s) {
  const testing::Finished f = testing::run_program(
      {kPython, file, "drive"}, kPeerMs, {{"MON", interval_s}});
  std::vector<double> seconds;
  for (const std::string& line : testing::split_lines(f.output))
    if (line.starts_with("recovery "))
      seconds.push_back(std::atof(line.c_str() + 9));
  const Summary s = summarize(seconds);
  if (seconds.empty())
    fmt::print("torchrun: {} printed no recovery:\n{}", file,
               testing::tail(f.output, 5));
  else
    fmt::print("{:<20} {:>6} {:>8.3f} {:>8.3f}   monitor interval {} s\n",
               "torchrun rank killed", seconds.size(), s.median, s.worst,
               interval_s);
  return s;
}

using Peers = std::map<std::string, Summary>;  // by monitor interval

bool wanted(const Arguments& a, const std::string& row) {
  return a.rows.empty() ||
         std::find(a.rows.begin(), a.rows.end(), row) != a.rows.end();
}

bool run_coordinator_row(const Arguments& a, Bench* bench, Targets& targets) {
  std::vector<double> around;
  std::vector<double> before;
  std::vector<double> typical;
  for (int i = 0; i < a.trials; ++i) {
    GapTrial t;
    if (!bench->coordinator_killed(&t)) return false;
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
      "{:.3f} s.\n",
      a.trials, s.median, s.worst, b.median, b.worst,
      summarize(typical).median);
  targets.at_most("coordinator: longest time between steps over that before",
                  kGapRatio, s.median / b.median);
  return true;
}

void print_head(const Arguments& a) {
  fmt::print(
      "bench_elastic: {} workers with one rank each on {} cores, {}, "
      "ZeRO-{},\ncheckpoint every {} steps, elastic.dead_after_ms "
      "{}, elastic.hang_after_s {}, {} trials\nper row\n\n",
      a.bench.workers, std::thread::hardware_concurrency(),
      a.bench.model.empty() ? "0.1 M parameters" : a.bench.model,
      a.bench.zero_stage, a.bench.interval, a.bench.dead_after_ms,
      a.bench.hang_after_s, a.trials);
  fmt::print("{:<20} {:>6} {:>17} {:>17} {:>5} {:>6}\n", "", "",
             "to the next step", "no step finished", "lost", "");
  fmt::print("{:<20} {:>6} {:>8} {:>8} {:>8} {:>8} {:>5} {:>6}   {}\n", "fault",
             "trials", "median", "worst", "median", "worst", "steps", "step",
             "ended + planned + first step");
  std::fflush(stdout);
}

void print_notes() {
  fmt::print(
      "\nTimes in seconds; the worst number of lost steps; the median step of "
      "the row. The\nnext step is the first one finished in the new "
      "generation. During join, drain and\nscale the old mesh keeps training: "
      "the pause is the second pair of columns. A join\nincludes the start of "
      "the worker process and elastic.join_window_ms (200 here). The\nlast "
      "column splits the first median: until the old generation has ended, "
      "until the\nnew one is planned, until its first step.\n");
}

using Outcomes = std::map<std::string, Outcome>;

void judge(const Arguments& a, const Outcomes& outcomes, const Peers& peers,
           Targets& targets) {
  for (const auto& [row, o] : outcomes) {
    if (row == "rank" || row == "worker" || row == "host")
      targets.at_most(row + ": to the next step, median, 0.5 s plus a step",
                      kRecoveryS + o.step_s, o.next.median);
    if (row == "stopped")
      targets.at_most("stopped: detected, worst, hang_after_s + reports",
                      a.bench.hang_after_s + kFoundSlackS, o.noticed.worst);
    if (row == "silent")
      targets.at_most(
          "silent: detected, worst, dead_after_ms + reports",
          static_cast<double>(a.bench.dead_after_ms) * 1e-3 + kFoundSlackS,
          o.noticed.worst);
    else
      targets.require(row + ": no finished step is lost", o.lost.worst == 0);
    if (row == "join" || row == "drain" || row == "scale")
      targets.at_most(row + ": pause of training, median", kPauseS,
                      o.pause.median);
    if (row == "join")
      targets.at_most("join: worst pause of training over the median",
                      kJoinRatio, o.pause.worst / o.pause.median);
  }
  const auto rank = outcomes.find("rank");
  for (const auto& [interval, peer] : peers)
    if (rank != outcomes.end())
      targets.at_least(
          fmt::format("rank: torchrun's time at {} s over remesh's", interval),
          interval == kPeerIntervals[0] ? kPeerRatio : 1,
          peer.median / rank->second.next.median);
}

int run(const Arguments& a) {
  const testing::TinyData data;
  Outcomes outcomes;
  Targets targets(a.smoke);
  {
    Bench bench(data.path(), a.bench);
    print_head(a);
    for (const Fault& fault : bench.faults()) {
      if (!wanted(a, fault.name)) continue;
      const double begin = unix_seconds();
      std::vector<Trial> trials(static_cast<size_t>(a.trials));
      for (int i = 0; i < a.trials; ++i)
        if (!bench.run(fault, i, &trials[static_cast<size_t>(i)]))
          return kExitFailed;
      outcomes[fault.name] = outcome_of(trials, bench.median_step_s(begin));
      print_row(fault.text, trials.size(), outcomes[fault.name]);
    }
    const std::string error = bench.sequence_error();
    targets.require("metrics.jsonl has each step once, in order: " + error,
                    error.empty());
    const std::string parts = bench.start_parts();
    if (wanted(a, kCoordinatorRow) && !run_coordinator_row(a, &bench, targets))
      return kExitFailed;
    if (!parts.empty())
      fmt::print("\nparts of the start of the last rank: {}\n", parts);
  }
  Peers peers;
  if (!a.peer.empty() && !a.bench.model.empty()) {
    fmt::print("torchrun: skipped, the peer has no model of that size\n");
  } else if (!a.peer.empty()) {
    fmt::print("\ntorchrun of PyTorch {}", peer_version());
    for (const char* interval : kPeerIntervals)
      peers[interval] = run_peer(a.peer, interval);
  }
  print_notes();
  judge(a, outcomes, peers, targets);
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  CLI::App app("Time from a fault to the next finished step.");
  Arguments a;
  add_number(app, "--trials", a.trials, "Faults per row", 1, 1000);
  add_number(app, "--workers", a.bench.workers, "Workers, one rank each", 2,
             64);
  add_number(app, "--interval", a.bench.interval, "Steps between checkpoints",
             0, 100000);
  app.add_option("--dead-after-ms", a.bench.dead_after_ms,
                 "elastic.dead_after_ms")
      ->capture_default_str();
  add_number(app, "--hang-after-s", a.bench.hang_after_s,
             "elastic.hang_after_s", 0.5, 600.0);
  add_number(app, "--zero-stage", a.bench.zero_stage, "parallel.zero_stage", 0,
             3);
  app.add_flag("--no-auth", a.bench.no_auth,
               "Without keys on the control plane, to see what they cost");
  app.add_option("--model", a.bench.model,
                 "15m, 42m or 110m instead of 0.1 M parameters")
      ->check(CLI::IsMember({"15m", "42m", "110m"}));
  app.add_option("--rows", a.rows, "Only these rows")
      ->delimiter(',')
      ->check(CLI::IsMember({"rank", "worker", "host", "stopped", "silent",
                             "join", "drain", "scale", "coordinator"}));
  app.add_option("--peer", a.peer,
                 "Python program that measures torchrun: with the argument "
                 "'drive' and its monitor interval in $MON it prints lines "
                 "\"recovery X s\"")
      ->check(CLI::ExistingFile);
  app.add_flag("--smoke", a.smoke,
               "One fault in each of a few rows; no target is judged");
  CLI11_PARSE(app, argc, argv);
  if (a.smoke) {
    a.trials = 1;
    a.bench.workers = 2;
    a.rows = {"rank", "join"};
  }
  return run(a);
}
