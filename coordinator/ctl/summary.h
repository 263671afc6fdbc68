// The page at the end of `remesh run`: a pure function of what the run's files
// hold.
#pragma once

#include <string>
#include <vector>

#include "coordinator/ctl/render.h"
#include "proto/control.pb.h"

namespace remesh::ctl {

struct RunSummary {
  std::string job_file;  // as the user gave it
  std::string run_dir;
  std::string outcome;  // "done", "stopped", "failed", "interrupted"
  int64_t steps = 0;    // the job's
  double began = 0;     // unix seconds: events before are of earlier sessions
  std::vector<pb::StepMetrics> metrics;  // whole run
  std::vector<pb::EventRecord> events;   // whole run
  std::string checkpoint;  // newest one's path, "" when there is none
};

// Several lines, each ended by '\n'.
std::string summary_text(const RunSummary& s, const Style& style);

}  // namespace remesh::ctl
