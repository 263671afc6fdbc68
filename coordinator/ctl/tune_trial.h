// One trial of `remesh tune`: a short run of the job, and how long its steps
// take.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/ctl/children.h"
#include "coordinator/rundir/line_file.h"

namespace remesh::ctl {

struct TrialOptions {
  std::string run_dir;
  std::vector<std::string> argv;  // runs the job there to its end
  std::vector<std::string> stop;  // ends it early
  int64_t silence_s = 300;        // without a step for so long it has failed
  double best_s = 0;              // of other trials; 0: none
  // argv may wait for a long time, in the queue of a cluster, before a
  // coordinator begins; silence counts from then on. Until then SIGTERM ends
  // it.
  bool queued = false;
};

struct TrialResult {
  std::optional<double> step_s;  // the median; nothing: it failed
  std::string error;             // why it failed
  bool interrupted = false;
};

// The first steps, which allocate memory, do not count.
inline constexpr int64_t kUncountedSteps = 2;
// A trial that is this many times slower than the best one is stopped early.
inline constexpr double kHopeless = 2;

// The median of the steps that count; nothing if there is none.
std::optional<double> step_time(const std::vector<double>& step_s);

// Returns when all processes of the trial have ended. `on_step` is called with
// the number of finished steps; once `interrupts` returns 1, the trial is
// stopped, and once it returns more, killed.
TrialResult run_trial(const TrialOptions& options,
                      const std::function<void(int64_t)>& on_step,
                      const std::function<int()>& interrupts);

}  // namespace remesh::ctl
