#include "worker/train/step_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "proto/base/median.h"

namespace remesh::train {
namespace {

constexpr double kNormal = 1.4826;     // spread of a normal distribution
constexpr double kLeastSpread = 0.01;  // of the median

}  // namespace

StepPolicy::StepPolicy(const StepPolicyOptions& options, const PastSteps& past)
    : options_(options) {
  for (const auto& step : past) add(step.loss(), step.skipped());
}

double StepPolicy::limit() const {
  if (options_.spike_factor <= 0 || losses_.size() < kLeast)
    return std::numeric_limits<double>::infinity();
  std::vector<double> v(losses_.begin(), losses_.end());
  const double middle = median(v);
  for (double& x : v) x = std::abs(x - middle);
  const double spread =
      std::max(kNormal * median(std::move(v)), kLeastSpread * std::abs(middle));
  return middle + options_.spike_factor * spread;
}

bool StepPolicy::accepts(double loss, double grad_norm) {
  const bool finite = std::isfinite(loss) && std::isfinite(grad_norm);
  const bool good = finite && loss <= limit();
  const bool skipped = !good && skipped_ < options_.most_skipped;
  add(loss, skipped);
  return !skipped;
}

void StepPolicy::add(double loss, bool skipped) {
  skipped_ = skipped ? skipped_ + 1 : 0;
  // A step whose sequences have no target has the loss 0.
  if (skipped || loss == 0 || !std::isfinite(loss)) return;
  losses_.push_back(loss);
  if (losses_.size() > kWindow) losses_.pop_front();
}

}  // namespace remesh::train
