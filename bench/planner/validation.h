// What `bench_planner validate` prints: errors of predictions by device and by
// source, with each source left out of the fit, rank correlation and regret.
#pragma once

#include <string>
#include <vector>

#include "bench/planner/fit.h"

namespace remesh::bench {

struct Scored {
  const Row* row = nullptr;
  double predicted = 0;  // tokens/s of a device
  double error() const;  // |predicted / measured - 1|
};

// Mean absolute percentage error. REQUIRES: not empty.
double mape(const std::vector<Scored>& scored);

// Layouts of one model on the same devices and batch, measured by one source.
struct Ranking {
  std::string model;
  size_t layouts = 0;
  double spearman = 0;
  double regret = 0;  // of the best prediction: share of the best measurement
};
// Of each model with at least five layouts.
std::vector<Ranking> rankings(const std::vector<Scored>& scored);

// Rows whose device no cluster has are added to *skipped, if that is given.
// Fails like cluster_of() if no row is left.
Result<std::vector<Sample>> samples_of(const std::vector<ClusterFile>& clusters,
                                       const std::vector<Row>& rows,
                                       Skipped* skipped = nullptr);
std::vector<Scored> score(const std::vector<ClusterFile>& clusters,
                          const std::vector<Sample>& samples);

// Sets efficiency.error of each cluster to the error that nine of ten of its
// samples stay below; where it has few samples, to that of all samples if that
// is more; where no sample has its chip, to that of all samples as if none had
// been measured, with what is expected of any device.
void set_errors(const std::vector<Sample>& samples,
                std::vector<ClusterFile>* clusters);

}  // namespace remesh::bench
