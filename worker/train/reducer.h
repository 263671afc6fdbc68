// GradReducer: sums gradients over the data-parallel ranks in buckets, each
// started as soon as backward has finished it, so that communication runs
// beside computation (Li et al., "PyTorch Distributed", VLDB 2020).
//
// Buckets cut the flat vector from its end in equal pieces, whatever the
// parameters' borders: backward finishes the last parameters first. They start
// strictly in that order on every rank, also on one that has no microbatch.
// The cut depends on table and size alone, so sums have the same bits from run
// to run.
//
// Threads: one thread. MPI moves data while ready() and finish() run.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"

namespace remesh::train {

class GradReducer {
 public:
  // `table` and `dp` must outlive it. REQUIRES: bucket_elements >= 1.
  GradReducer(const geometry::ParamTable& table, int64_t bucket_elements,
              comm::Comm& dp);

  int64_t num_buckets() const { return static_cast<int64_t>(waits_.size()); }

  // A new step. `grads`, num_elements long, must stay until finish().
  void begin(std::span<float> grads);
  // The gradient of parameter i is final on this rank. REQUIRES: once a step.
  void ready(size_t param);
  // All of them are: what ready() has not said yet.
  void all_ready();
  // Returns when every bucket is summed; `tick` runs after each.
  // REQUIRES: every parameter is ready.
  void finish(const std::function<void()>& tick);

 private:
  struct Range {
    int64_t begin, end;
  };
  Range bucket(int64_t k) const;
  void start_ready();

  const geometry::ParamTable& table_;
  const int64_t bucket_elements_;
  comm::Comm& dp_;
  std::vector<int64_t> parts_;  // parameters that overlap bucket k
  std::vector<int64_t> waits_;  // ... of them not ready in this step
  std::vector<bool> is_ready_;
  std::span<float> grads_;
  int64_t next_ = 0;  // bucket to start
  std::deque<comm::RequestPtr> under_way_;
};

}  // namespace remesh::train
