// `remesh plan` as text: pure functions.
#pragma once

#include <string>

#include "parallel/planner/placement.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

struct PlanOptions {
  std::string job_file;
  std::vector<std::string> set;
  int slots = 1;  // of each host
  int hosts = 1;
  int cores = 0;          // of each host; 0: this machine's
  double memory_gib = 0;  // of each host; 0: not checked
  std::string layout;     // "": selected automatically
  planner::Machine core = planner::reference_core();  // of the hosts
  bool json = false;
};

// The mesh that the job would get, its stages, schedule and memory, as text or
// JSON. The error is the reason why there is none. REQUIRES: `job` is resolved.
Result<std::string> plan_text(const pb::Job& job, const PlanOptions& options);

}  // namespace remesh::ctl
