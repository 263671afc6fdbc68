// The page that `remesh run` prints at the end: a pure function of the contents
// of the run's files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/ctl/render.h"
#include "proto/control.pb.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

struct RunSummary {
  std::string resume;  // the command that continues the run as it was started
  std::string run_dir;
  // DONE, STOPPED, FAILED; UNKNOWN: interrupted.
  pb::JobStatus::State outcome = pb::JobStatus::UNKNOWN;
  pb::Job job;       // resolved
  double began = 0;  // unix seconds; earlier events are of earlier sessions
  std::string checkpoint;  // path of the newest one, "" if there is none
  std::string
      in_memory;  // rundir::state_text(), if no checkpoint has the state

  // In their order, those of all sessions.
  void add(const pb::StepMetrics& m);
  void add(pb::EventRecord e);

  std::vector<std::pair<int64_t, double>> losses;  // by step
  std::optional<pb::StepMetrics> first, last, validated;
  std::vector<pb::EventRecord> events;  // of this session, as the sums
  int64_t steps = 0;
  double seconds = 0;
  double tokens = 0;
};

// The command that trains a finished job twice as long, and what happens to the
// learning rate. `made`: the last step, if there is one.
std::vector<std::string> longer_advice(
    const pb::Job& job, const std::string& resume,
    const std::optional<pb::StepMetrics>& made = std::nullopt);

std::string summary_text(const RunSummary& s, const Style& style);

}  // namespace remesh::ctl
