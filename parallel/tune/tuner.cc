#include "parallel/tune/tuner.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "proto/base/check.h"

namespace remesh::tune {
namespace {

// The share of a standard normal distribution below z.
double normal_below(double z) {
  return 0.5 * std::erfc(-z / std::numbers::sqrt2);
}

// By how much a normally distributed value is expected to be below `best`.
double expected_improvement(double best, double mean, double deviation) {
  if (deviation <= 0) return std::max(0.0, best - mean);
  const double z = (best - mean) / deviation;
  const double density =
      std::exp(-0.5 * z * z) / std::sqrt(2 * std::numbers::pi);
  return deviation * (z * normal_below(z) + density);
}

std::vector<Features> scaled(const std::vector<Candidate>& candidates) {
  std::vector<double> low = candidates[0].knobs, high = low;
  for (const Candidate& c : candidates)
    for (size_t k = 0; k < low.size(); ++k) {
      low[k] = std::min(low[k], c.knobs[k]);
      high[k] = std::max(high[k], c.knobs[k]);
    }
  std::vector<Features> out;
  out.reserve(candidates.size());
  for (const Candidate& c : candidates) {
    Features f(low.size());
    for (size_t k = 0; k < low.size(); ++k)
      f[k] = high[k] > low[k] ? (c.knobs[k] - low[k]) / (high[k] - low[k]) : 0;
    out.push_back(std::move(f));
  }
  return out;
}

// A Gaussian process takes time cubic in its points. Of many trials, it learns
// from the fastest and from an even sample of the others.
std::vector<Trial> sample_of(std::vector<Trial> trials) {
  constexpr size_t kMost = 200, kFastest = 100;
  if (trials.size() <= kMost) return trials;
  std::ranges::stable_sort(trials, [](const auto& a, const auto& b) {
    return a.step_s.value_or(INFINITY) < b.step_s.value_or(INFINITY);
  });
  const size_t others = trials.size() - kFastest;
  for (size_t i = 0; i < kMost - kFastest; ++i)
    trials[kFastest + i] = trials[kFastest + i * others / (kMost - kFastest)];
  trials.resize(kMost);
  return trials;
}

}  // namespace

Tuner::Tuner(std::vector<Candidate> candidates, TunerOptions options)
    : candidates_(std::move(candidates)), options_(options) {
  CHECK(!candidates_.empty());
  features_ = scaled(candidates_);
}

void Tuner::add(const Trial& trial) {
  CHECK(trial.candidate < candidates_.size());
  trials_.push_back(trial);
}

std::optional<Trial> Tuner::best() const {
  std::optional<Trial> best;
  for (const Trial& t : trials_)
    if (t.step_s && (!best || *t.step_s < *best->step_s)) best = t;
  return best;
}

// Predictions of the logarithm of the seconds.
std::vector<GaussianProcess::Prediction> Tuner::predictions() const {
  std::vector<Features> x;
  std::vector<double> y;
  for (const Trial& t : sample_of(trials_)) {
    if (!t.step_s) continue;
    x.push_back(features_[t.candidate]);
    y.push_back(std::log(*t.step_s / candidates_[t.candidate].predicted_s));
  }
  std::vector<GaussianProcess::Prediction> out;
  out.reserve(candidates_.size());
  std::optional<GaussianProcess> error;
  if (!x.empty())
    error.emplace(std::move(x), y, Prior{.deviation = options_.model_error});
  for (size_t i = 0; i < candidates_.size(); ++i) {
    out.push_back(error ? error->predict(features_[i])
                        : GaussianProcess::Prediction{0, options_.model_error});
    out.back().mean += std::log(candidates_[i].predicted_s);
  }
  return out;
}

std::vector<double> Tuner::probabilities_to_run() const {
  // A failure says little about settings that differ by more than a third of a
  // knob's range, so that others are tried even if all have failed so far.
  constexpr double kLocal = 0.6, kDeviation = 0.5, kLeast = 0.05;
  std::vector<double> out(candidates_.size(), 1);
  std::vector<Features> x;
  std::vector<double> y;
  bool failed = false;
  for (const Trial& t : sample_of(trials_)) {
    x.push_back(features_[t.candidate]);
    y.push_back(t.step_s ? 1 : 0);
    failed |= !t.step_s;
  }
  if (!failed) return out;
  const GaussianProcess runs(
      std::move(x), y, {.deviation = kDeviation, .mean = 1, .scale = kLocal});
  for (size_t i = 0; i < out.size(); ++i) {
    const auto p = runs.predict(features_[i]);
    out[i] = normal_below((p.mean - 0.5) / std::max(p.deviation, kLeast));
  }
  return out;
}

std::optional<size_t> Tuner::next() const {
  std::set<size_t> tried;
  for (const Trial& t : trials_) tried.insert(t.candidate);
  const auto now = predictions();
  const auto runs = probabilities_to_run();
  const std::optional<Trial> best = this->best();
  std::optional<size_t> out;
  double most = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (tried.contains(i)) continue;
    // Before the first success, the least time that is likely to run.
    const double gain =
        best ? runs[i] * expected_improvement(std::log(*best->step_s),
                                              now[i].mean, now[i].deviation)
             : runs[i] / std::exp(now[i].mean);
    if (!out || gain > most) {
      out = i;
      most = gain;
    }
  }
  if (best && trials_.size() >= options_.least_trials &&
      most < options_.least_gain)
    return std::nullopt;
  return out;
}

std::vector<double> Tuner::estimates() const {
  std::vector<double> out;
  out.reserve(candidates_.size());
  for (const auto& p : predictions()) out.push_back(std::exp(p.mean));
  return out;
}

double Tuner::prediction_error() const {
  double sum = 0;
  int n = 0;
  for (const Trial& t : trials_) {
    if (!t.step_s) continue;
    sum += std::fabs(candidates_[t.candidate].predicted_s / *t.step_s - 1);
    ++n;
  }
  return n > 0 ? sum / n : 0;
}

std::vector<double> shapley_effects(const std::vector<Candidate>& candidates,
                                    const std::vector<double>& values) {
  CHECK(!candidates.empty() && candidates.size() == values.size());
  const size_t knobs = candidates[0].knobs.size();
  constexpr size_t kMostKnobs = 12;
  CHECK(knobs <= kMostKnobs);
  // worth[set][i]: the mean of the candidates that agree with i on the set.
  std::vector<std::vector<double>> worth(size_t{1} << knobs);
  for (size_t set = 0; set < worth.size(); ++set) {
    std::map<std::vector<double>, std::pair<double, int>> groups;
    std::vector<std::pair<double, int>*> group_of;
    for (size_t i = 0; i < candidates.size(); ++i) {
      std::vector<double> key;
      for (size_t k = 0; k < knobs; ++k)
        if ((set >> k & 1) != 0) key.push_back(candidates[i].knobs[k]);
      auto& g = groups[key];
      g.first += values[i];
      ++g.second;
      group_of.push_back(&g);
    }
    for (const auto* g : group_of) worth[set].push_back(g->first / g->second);
  }
  // Share of the orders in which exactly `size` knobs come before a given one:
  // size! (knobs - size - 1)! / knobs!.
  std::vector<double> share(knobs, 1 / static_cast<double>(knobs));
  for (size_t size = 1; size < knobs; ++size)
    share[size] = share[size - 1] * static_cast<double>(size) /
                  static_cast<double>(knobs - size);
  std::vector<double> out(knobs);
  for (size_t k = 0; k < knobs; ++k) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      double value = 0;
      for (size_t set = 0; set < worth.size(); ++set) {
        if ((set >> k & 1) != 0) continue;
        const auto size = static_cast<size_t>(__builtin_popcountll(set));
        value += share[size] * (worth[set | size_t{1} << k][i] - worth[set][i]);
      }
      out[k] += std::fabs(value);
    }
    out[k] /= static_cast<double>(candidates.size());
  }
  return out;
}

}  // namespace remesh::tune
