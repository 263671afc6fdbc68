// StepPolicy: which steps make no update, because their loss or gradient would
// spoil the weights. Their data count as used.
//
// A pure function of the agreed losses and norms, so that every rank decides
// alike, and of the steps before the generation, so that it decides as if the
// generation before had continued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "proto/control.pb.h"

namespace remesh::train {

struct StepPolicyOptions {
  // In a row. After so many a spike is accepted, and a step that is not finite
  // ends the job.
  int64_t most_skipped = 0;
  // A loss is a spike if it is above the median of the last losses by more than
  // this many times their spread: the median of the distances from the median,
  // times 1.4826, which makes it the standard deviation of a normal
  // distribution; at least 1 % of the median. 0: no loss is a spike.
  double spike_factor = 0;
};

class StepPolicy {
 public:
  static constexpr size_t kWindow = 64;  // losses
  static constexpr size_t kLeast = 16;   // below which no loss is a spike

  using PastSteps =
      google::protobuf::RepeatedPtrField<pb::Assignment::PastStep>;

  // past: the steps before, in order.
  explicit StepPolicy(const StepPolicyOptions& options = {},
                      const PastSteps& past = {});
  // Whether the step makes its update. True for one that is not finite: the
  // job must end.
  bool accepts(double loss, double grad_norm);
  // Greatest loss that is no spike; infinite if none is.
  double limit() const;

 private:
  void add(double loss, bool skipped);

  const StepPolicyOptions options_;
  std::deque<double> losses_;  // of the last steps that made their update
  int64_t skipped_ = 0;        // in a row
};

}  // namespace remesh::train
