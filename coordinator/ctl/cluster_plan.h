// `remesh plan --cluster`: the best ways to train a model on a number of
// devices of a described cluster (planner/search.h), as text or JSON. Pure.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "coordinator/ctl/descriptions.h"
#include "parallel/planner/search.h"

namespace remesh::ctl {

struct ClusterPlanOptions {
  std::string model, cluster;  // find_model(), find_cluster()
  std::vector<std::string> set;
  int64_t devices = 0;
  int64_t seq_len = 0;       // 0: the model's
  int64_t global_batch = 0;  // sequences; 0: the job's, or default_batch()
  bool fp8 = false;
  planner::PlanLimits limits;
  int meshes = 10;
  // Meshes to show by cause instead of a ranking: one, or two.
  std::string explain;
  std::vector<std::string> compare;
  bool json = false;
};

// Sequences of a step where nobody says: together 4 Mi tokens, which GPT-3 and
// Llama 2 were trained with, or 1 Ki for each device if that is more. Rounded
// down to a multiple of a power of two, at least a sixteenth of it, so that
// micro-batches divide it.
int64_t default_batch(int64_t seq_len, int64_t devices);

// What the options ask of the planner. Fails if the device has no fp8.
Result<planner::SearchRequest> search_request(const ClusterPlanOptions& options,
                                              const ModelChoice& model,
                                              const ClusterChoice& cluster);
// "llama3-70b: 70.6B parameters, on 64 x H100 (8 nodes of 8); ...\n"
std::string plan_heading(const planner::SearchRequest& request,
                         const ModelChoice& model,
                         const ClusterChoice& cluster);
int64_t parameters_of(const planner::SearchRequest& request);
// The range in which nine of ten steps are, from what measured runs on such
// devices took; {0, 0} if that is unknown. As text: a line, or "".
std::pair<double, double> step_range_s(const ClusterChoice& cluster,
                                       const planner::Plan& plan);
std::string step_range_text(const ClusterChoice& cluster,
                            const planner::Plan& plan);

// The meshes ranked, what limits the best one, and what a change of one of its
// settings costs; or time and memory by cause of the meshes that are given,
// whether or not they fit. Fails like search_layouts().
Result<std::string> cluster_plan(const ClusterPlanOptions& options,
                                 const ModelChoice& model,
                                 const ClusterChoice& cluster);

}  // namespace remesh::ctl
