// One run of a study: its settings and what the planner predicts of it.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "coordinator/ctl/descriptions.h"
#include "parallel/planner/search.h"

namespace remesh::ctl {

struct StudyRun {
  planner::Plan plan;
  double peak_flops = 1;
  double busy_w = 0;  // of a device, as is idle_w
  double idle_w = 0;
  bool too_large = false;  // needs more memory than a device has
};

// Reads descriptions once.
class StudyRuns {
 public:
  // `settings` is an object, complete: "base" is resolved. Fails, naming the
  // key and what is allowed, or like search_layouts().
  Result<StudyRun> predict(const nlohmann::json& settings);

 private:
  std::map<std::string, ClusterChoice> clusters_;
  std::map<std::string, ModelChoice> models_;
};

// By the names that study files use: tokens_per_s (of a device), step_s, mfu,
// hfu, tflops, watts, joules_per_token, memory_gb, exposed, bubble; shares in
// percent. Fails, naming these.
Result<double> study_metric(const StudyRun& run, const std::string& name);

}  // namespace remesh::ctl
