// The page that `remesh run` prints at the end: a pure function of the contents
// of the run's files.
#pragma once

#include <string>
#include <vector>

#include "coordinator/ctl/render.h"
#include "proto/control.pb.h"

namespace remesh::ctl {

struct RunSummary {
  std::string job_file;  // as typed by the user
  std::string run_dir;
  std::string outcome;  // "done", "stopped", "failed", "interrupted"
  int64_t steps = 0;    // the job's
  double began = 0;     // unix seconds; earlier events are of earlier sessions
  std::vector<pb::StepMetrics> metrics;  // of all sessions
  std::vector<pb::EventRecord> events;   // of all sessions
  std::string checkpoint;  // path of the newest one, "" if there is none
};

std::string summary_text(const RunSummary& s, const Style& style);

}  // namespace remesh::ctl
