// Predictions for measured runs: the cluster of a row, and what the row leaves
// open chosen as a user of the planner would.
#pragma once

#include <string>
#include <vector>

#include "bench/planner/rows.h"
#include "parallel/planner/step_cost.h"
#include "proto/cluster.pb.h"

namespace remesh::bench {

struct ClusterFile {
  std::string name;  // of the file, without ".toml"
  pb::Cluster cluster;
};
// All descriptions in a folder, by name.
Result<std::vector<ClusterFile>> read_clusters(const std::string& folder);

// The index of the cluster with the row's device; of several, of the one whose
// memory is nearest. If the row does not say how much it has, of the one that
// is called like the device, as most have its usual memory, else of the one
// with most. Fails, listing the devices that are there.
Result<size_t> cluster_of(const std::vector<ClusterFile>& clusters,
                          const Row& row);

// Tokens a second of one device. A micro-batch, layout or (1F1B or interleaved,
// where there is no micro-batch either) schedule that the row does not give is
// the one with the best prediction among those that fit into memory.
planner::StepCost predict(const planner::Machine& machine, const Row& row);

}  // namespace remesh::bench
