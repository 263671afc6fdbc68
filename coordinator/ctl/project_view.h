// `remesh plan project`: what training takes in time, energy and money, and
// what failures cost, as text or JSON. Pure.
#pragma once

#include <string>

#include "coordinator/ctl/cluster_plan.h"

namespace remesh::ctl {

struct ProjectOptions {
  ClusterPlanOptions plan;
  double tokens = 0;
  // Mean time between failures of a device. The default is from Llama 3's
  // training: 419 interruptions of 16,384 H100 in 54 days (arXiv 2407.21783,
  // section 3.3.4).
  double mtbf_hours = 50000;
  // Checkpoints: storage that all devices share, and the time from a failure to
  // the first step with the job's scheduler, libraries and data.
  double storage_gb_per_s = 100;
  double restart_s = 600;
  // remesh: from a failure to the next step without the state's way over the
  // network (bench_elastic), and until a lost node is replaced.
  double recover_s = 0.5;
  double replace_s = 600;
  double price_per_hour = -1;  // of a device; -1: the cluster's
};

// Fails like cluster_plan().
Result<std::string> project_text(const ProjectOptions& options,
                                 const ModelChoice& model,
                                 const ClusterChoice& cluster);

}  // namespace remesh::ctl
