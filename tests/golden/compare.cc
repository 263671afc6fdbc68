#include "tests/golden/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

namespace remesh::golden {
namespace {

// A single tensor's error is one draw of a random quantity.
constexpr double kOverAutocast = 1.1;
// AMX attention also rounds the softmax and its gradient, as autocast does.
// Where a file has autocast's errors, the reference's are 0.83 to 0.89 of them,
// so this is about autocast again.
constexpr double kOverReference = 1.5;
constexpr double kAllOverReference = 1.16;
constexpr double kLeast = 0.5;
// Standard errors of a loss: 1 of 370 draws is further off.
constexpr double kLossDeviations = 3;
// After the first step there is nothing to compare with. The largest values
// measured on the same files and layouts, with and without AMX, were 1.2e-3,
// 1.5e-2, 3.8e-3 and 2.4e-2; a step that goes wrong shows as more than 5e-2.
constexpr double kLaterLoss = 3e-3;
constexpr double kLaterNorm = 3e-2;
constexpr double kLaterWeights = 8e-3;
constexpr double kLaterParameter = 2e-2;

double relative(double a, double b) { return std::abs(a - b) / std::abs(b); }

double root_mean_square(std::span<const double> values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// How far rounding may move the loss when it moves the logits by `logits`,
// relative to their norm. A token's loss moves by as much as one logit, in
// either direction, and the loss is the mean over all tokens. So its error is
// far smaller than that of the logits, and of random sign and size: a single
// recorded value of it, like autocast's, bounds nothing.
double loss_bound(const Golden& g, double logits) {
  double squares = 0;
  for (const float v : g.first_logits)
    squares += static_cast<double>(v) * static_cast<double>(v);
  const double logit =
      std::sqrt(squares / static_cast<double>(g.first_logits.size()));
  const auto tokens = static_cast<double>(g.sequences * g.seq_len);
  return kLossDeviations * logits * logit / g.first_loss / std::sqrt(tokens);
}

// By how much more the error of a parameter of n elements may be off. The ratio
// of two independent root mean squares of n draws has a standard deviation of
// about 1 / sqrt(n).
double spread(int64_t n) {
  constexpr double kDeviations = 3;
  return 1 + kDeviations / std::sqrt(static_cast<double>(n));
}

// Bounds of a run whose first step may be off by these.
Bounds bf16_bounds(const Golden& g, StepErrors errors, double logits,
                   double tensor, double tensors) {
  Bounds b{.loss = kLaterLoss, .norm = kLaterNorm, .weights = kLaterWeights};
  const double gradients = root_mean_square(errors.gradients);
  b.first_gradients = tensors * gradients;
  b.first_gradients_least = kLeast * gradients;
  const auto table = geometry::ParamTable::make(g.config);
  for (size_t i = 0; i < table.size(); ++i) {
    errors.gradients[i] *= tensor * spread(table[i].numel());
    b.parameter_weights.push_back(kLaterParameter * spread(table[i].numel()));
  }
  errors.logits *= logits;
  errors.loss = loss_bound(g, errors.logits);
  b.first = std::move(errors);
  return b;
}

class Verdict {
 public:
  explicit Verdict(bool verbose) : verbose_(verbose) {}
  // NaN exceeds every bound.
  void add(const std::string& what, double error, double bound,
           bool detail = false) {
    const bool ok = error <= bound;
    if (!ok) failed_ = true;
    if (ok && detail && !verbose_) return;
    fmt::print("{:<64} {:.3e}  bound {:.1e}  {}\n", what, error, bound,
               ok ? "ok" : "PAST THE BOUND");
  }
  void fail(const std::string& why) {
    failed_ = true;
    fmt::print("{}\n", why);
  }
  // Each parameter separately; the one closest to its bound is always printed.
  void add_parameters(const std::string& what,
                      const geometry::ParamTable& table,
                      std::span<const double> errors,
                      std::span<const double> bounds) {
    size_t worst = 0;
    for (size_t i = 0; i < table.size(); ++i) {
      add(what + " " + table[i].name, errors[i], bounds[i], true);
      if (!(errors[i] / bounds[i] <= errors[worst] / bounds[worst])) worst = i;
    }
    add(what + ", worst: " + table[worst].name, errors[worst], bounds[worst]);
  }
  bool failed() const { return failed_; }

 private:
  bool verbose_;
  bool failed_ = false;
};

// |a - b| / |b|, both as vectors; |a| if b is zero.
double relative_l2(std::span<const float> a, std::span<const float> b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  if (size == 0) return std::sqrt(difference);
  return std::sqrt(difference / size);
}

std::vector<double> parameter_errors(const geometry::ParamTable& table,
                                     std::span<const float> got,
                                     std::span<const float> want) {
  std::vector<double> errors;
  for (size_t i = 0; i < table.size(); ++i) {
    const auto at = static_cast<size_t>(table.offset(i));
    const auto n = static_cast<size_t>(table[i].numel());
    errors.push_back(relative_l2(got.subspan(at, n), want.subspan(at, n)));
  }
  return errors;
}

}  // namespace

StepErrors first_step_errors(const Golden& g, const Outcome& run) {
  return {.loss = relative(run.loss[0], g.first_loss),
          .logits = relative_l2(run.first_logits, g.first_logits),
          .gradients = parameter_errors(geometry::ParamTable::make(g.config),
                                        run.first_grads, g.first_grads)};
}

Bounds fp32_bounds(const Golden& g) {
  constexpr double kBound = 1e-4, kLogits = 1e-5;
  const size_t parameters = geometry::ParamTable::make(g.config).size();
  return {.first = {.loss = 1e-5,
                    .logits = kLogits,
                    .gradients = std::vector<double>(parameters, kBound)},
          .first_gradients = kBound,
          .loss = kBound,
          .norm = kBound,
          .weights = kBound,
          // Adam moves an element whose gradient is rounding alone by a full
          // learning rate. Measured: up to 1.8e-4.
          .parameter_weights = std::vector<double>(parameters, 5 * kBound)};
}

Bounds bf16_bounds(const Golden& g, const StepErrors& reference) {
  if (g.autocast) return bf16_bounds(g, *g.autocast, 1, kOverAutocast, 1);
  return bf16_bounds(g, reference, kAllOverReference, kOverReference,
                     kAllOverReference);
}

bool compare(const Golden& g, const Outcome& run, const Bounds& bounds,
             bool verbose) {
  const auto table = geometry::ParamTable::make(g.config);
  const StepErrors first = first_step_errors(g, run);
  Verdict v(verbose);
  v.add("first loss", first.loss, bounds.first.loss);
  v.add("first logits of sequence 0", first.logits, bounds.first.logits);
  v.add_parameters("gradient", table, first.gradients, bounds.first.gradients);
  const double mean = root_mean_square(first.gradients);
  v.add("gradient, mean of all parameters", mean, bounds.first_gradients);
  if (mean < bounds.first_gradients_least) v.fail("too precise for bf16");
  for (size_t s = 0; s < g.loss.size(); ++s) {
    if (s > 0)
      v.add(fmt::format("step {} loss", s + 1),
            relative(run.loss[s], g.loss[s]), bounds.loss);
    v.add(fmt::format("step {} gradient norm", s + 1),
          relative(run.grad_norm[s], g.grad_norm[s]), bounds.norm);
    v.add(fmt::format("step {} learning rate", s + 1),
          relative(run.lr[s], g.lr[s]), 1e-9);
  }
  v.add("weights after", relative_l2(run.weights_after, g.weights_after),
        bounds.weights);
  v.add_parameters("weights after", table,
                   parameter_errors(table, run.weights_after, g.weights_after),
                   bounds.parameter_weights);
  return !v.failed();
}

}  // namespace remesh::golden
