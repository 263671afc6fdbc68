// Tuner: Bayesian optimisation of a job's step time over a finite list of
// candidates. Pure.
//
// The cost model predicts the time of every candidate. A Gaussian process over
// the knobs learns by how much it is wrong (the logarithm of measured over
// predicted), another one where candidates fail. The next candidate is the one
// with the largest expected improvement (Jones et al. 1998) times the
// probability that it runs.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "parallel/tune/gaussian_process.h"

namespace remesh::tune {

struct Candidate {
  std::vector<double> knobs;  // one value for each knob, in any unit
  double predicted_s = 1;     // above 0
};

struct Trial {
  size_t candidate = 0;
  std::optional<double> step_s;  // nothing: it failed
};

struct TunerOptions {
  // Stop when no candidate is expected to improve the best by this share.
  double least_gain = 0.003;
  size_t least_trials = 6;  // but not before
  // Assumed standard deviation of the cost model's errors, of the logarithm.
  double model_error = 0.3;
};

class Tuner {
 public:
  // REQUIRES: at least one candidate, all with as many knobs.
  explicit Tuner(std::vector<Candidate> candidates, TunerOptions options = {});

  void add(const Trial& trial);
  // Nothing if all have been tried or none is expected to gain enough.
  std::optional<size_t> next() const;

  const std::vector<Trial>& trials() const { return trials_; }
  // The fastest trial; nothing if all failed.
  std::optional<Trial> best() const;
  // Seconds of each candidate by the cost model and what was measured.
  std::vector<double> estimates() const;
  // Mean absolute error of the predictions before any trial, as a share of what
  // was measured.
  double prediction_error() const;

 private:
  std::vector<GaussianProcess::Prediction> predictions() const;
  std::vector<double> probabilities_to_run() const;

  std::vector<Candidate> candidates_;
  std::vector<Features> features_;  // knobs from 0 to 1
  TunerOptions options_;
  std::vector<Trial> trials_;
};

// How much each knob decides about `values` of the candidates: the mean
// absolute Shapley value, exact, with the mean over all candidates that have
// the same values of some knobs as the value of these knobs (Lundberg and Lee
// 2017). So only candidates count that exist. REQUIRES: as many values as
// candidates, at most 12 knobs.
std::vector<double> shapley_effects(const std::vector<Candidate>& candidates,
                                    const std::vector<double>& values);

}  // namespace remesh::tune
