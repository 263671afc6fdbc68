// The faults that bench_elastic measures, each on a running cluster.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/testing/cluster.h"

namespace remesh::bench {

// One fault. Seconds; negative: not measured.
struct Trial {
  double recovery_s = -1;   // from the fault to the next finished step
  double pause_s = -1;      // between the finished steps before and after
  int64_t lost_steps = -1;  // in metrics.jsonl, and made again by rank 0
  // Parts of recovery_s.
  double noticed_s = -1;  // fault to the old generation's end
  double planned_s = -1;  // to the new generation's plan
  double first_step_s = -1;
};

// Around the death of the coordinator, which should not delay any step.
struct GapTrial {
  double longest_s = -1;         // between finished steps, around the kill
  double longest_before_s = -1;  // in an equally long time before it
  double median_s = -1;
};

// Whom a fault hits, and when.
struct Victim {
  std::string worker;
  pid_t rank = 0;
  double time = 0;  // unix seconds, right before the fault
};

struct Fault {
  const char* name;
  const char* text;
  // May set the time, if it has something to do before.
  std::function<void(Victim&)> inject;
  // Called when the next step has finished.
  std::function<void(const Victim&)> undo;
};

struct BenchOptions {
  int workers = 4;
  int interval = 100;  // of checkpoints
  int dead_after_ms = 2000;
  double hang_after_s = 2;
  int zero_stage = 1;
  bool no_auth = false;  // without keys, to see what they cost
  std::string model;     // of options.h; "": 0.1 M parameters
};

class Bench {
 public:
  // Starts a cluster of workers with one slot each and waits until it trains;
  // aborts if it does not.
  Bench(const std::string& data_path, const BenchOptions& options);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  std::vector<Fault> faults();
  // These restore the cluster to what it was. False (with the reason on stderr)
  // if it does not recover in time.
  bool run(const Fault& fault, int trial, Trial* out);
  bool coordinator_killed(GapTrial* out);

  // The first violation of the rule that metrics.jsonl has each step once and
  // in order; "" if there is none.
  std::string sequence_error() const;
  // Of the steps finished since that time.
  double median_step_s(double since) const;
  // How long the parts of rank 0's start took in the newest generation, from
  // its log.
  std::string start_parts() const;

 private:
  std::string name_of(int index) const;
  bool settle();
  std::string log_of_rank_0(int64_t generation) const;
  // That rank 0 made in that generation, from its log; -1: none.
  int64_t first_step_of(int64_t generation) const;
  pid_t some_rank(int trial);
  bool measure(double fault_time, int64_t generation, Trial* out);

  testing::Cluster cluster_;
  int workers_;
};

}  // namespace remesh::bench
