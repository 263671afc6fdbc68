// `remesh plan` as text: pure.
#pragma once

#include <string>

#include "parallel/planner/deal.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

struct PlanOptions {
  std::string job_file;
  std::vector<std::string> set;
  int slots = 1;  // of each host
  int hosts = 1;
  int cores = 0;          // of each host; 0: this machine's
  double memory_gib = 0;  // of each host; 0: not looked at
  std::string layout;     // instead of the one that would be chosen
};

// The mesh that the job would get, its stages, schedule and memory. Fails with
// the reason when there is none. REQUIRES: resolve() made the job.
Result<std::string> plan_text(const pb::Job& job, const PlanOptions& options);

}  // namespace remesh::ctl
