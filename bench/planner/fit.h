// Fits the [efficiency] of cluster descriptions to measured runs: one set for
// each cluster, none for a row or a source.
#pragma once

#include <vector>

#include "bench/planner/prediction.h"

namespace remesh::bench {

// A row, the cluster that it ran on and how much it counts.
struct Sample {
  const Row* row = nullptr;
  size_t cluster = 0;
  double weight = 1;
};

// Whether the devices compute with the same chip: A100 of 40 and 80 GB.
bool same_chip(const pb::Cluster& a, const pb::Cluster& b);

// Whether a sample ran on the chip of the cluster.
bool is_measured(const ClusterFile& cluster,
                 const std::vector<ClusterFile>& clusters,
                 const std::vector<Sample>& samples);

// The clusters with [efficiency] fitted: the least sum over the samples of
// |log(predicted / measured)|, and over the constants of their squared distance
// from what is expected of any device (kPriors in fit.cc), or of other clusters
// with the same chip, which decides what the samples do not. The previous
// values of [efficiency] do not matter.
std::vector<ClusterFile> fit(const std::vector<ClusterFile>& clusters,
                             const std::vector<Sample>& samples);

}  // namespace remesh::bench
