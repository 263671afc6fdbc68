#include "parallel/tune/gaussian_process.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "proto/base/check.h"

namespace remesh::tune {
namespace {

constexpr double kPriorPoints = 2;
constexpr double kScales[] = {0.2, 0.4, 0.8, 1.6, 3.2, 6.4};
constexpr double kNoises[] = {1e-4, 1e-3, 1e-2, 1e-1};
// Log-normal priors: their medians, and deviations of the logarithm.
constexpr double kUsualScale = 0.8, kScaleSpread = 1;
constexpr double kUsualNoise = 3e-3, kNoiseSpread = 1.5;

// The logarithm of a log-normal density, but for a constant.
double log_normal(double x, double median, double spread) {
  const double z = std::log(x / median) / spread;
  return -0.5 * z * z;
}

// Solves L z = b, where L is a lower triangle stored row by row.
std::vector<double> solve_lower(const std::vector<double>& l,
                                std::vector<double> b) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < i; ++j) b[i] -= l[i * n + j] * b[j];
    b[i] /= l[i * n + i];
  }
  return b;
}

// Solves L^T z = b.
std::vector<double> solve_upper(const std::vector<double>& l,
                                std::vector<double> b) {
  const size_t n = b.size();
  for (size_t i = n; i-- > 0;) {
    for (size_t j = i + 1; j < n; ++j) b[i] -= l[j * n + i] * b[j];
    b[i] /= l[i * n + i];
  }
  return b;
}

// The lower Cholesky factor of a symmetric matrix. REQUIRES: positive definite.
std::vector<double> cholesky(std::vector<double> a, size_t n) {
  for (size_t j = 0; j < n; ++j) {
    for (size_t k = 0; k < j; ++k) a[j * n + j] -= a[j * n + k] * a[j * n + k];
    CHECK(a[j * n + j] > 0);
    a[j * n + j] = std::sqrt(a[j * n + j]);
    for (size_t i = j + 1; i < n; ++i) {
      for (size_t k = 0; k < j; ++k)
        a[i * n + j] -= a[i * n + k] * a[j * n + k];
      a[i * n + j] /= a[j * n + j];
    }
  }
  return a;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace

GaussianProcess::GaussianProcess(std::vector<Features> x,
                                 const std::vector<double>& y,
                                 const Prior& prior)
    : x_(std::move(x)), residuals_(y), prior_(prior) {
  CHECK(!y.empty() && x_.size() == y.size());
  mean_ = prior.mean ? *prior.mean
                     : std::accumulate(y.begin(), y.end(), 0.0) /
                           static_cast<double>(y.size());
  for (double& r : residuals_) r -= mean_;
  search();
}

double GaussianProcess::covariance(const Features& a, const Features& b) const {
  double square = 0;
  for (size_t d = 0; d < a.size(); ++d) {
    const double z = (a[d] - b[d]) / kernel_.scales[d];
    square += z * z;
  }
  const double r = std::sqrt(5 * square);
  return (1 + r + r * r / 3) * std::exp(-r);
}

double GaussianProcess::use(const Kernel& kernel) {
  kernel_ = kernel;
  const size_t n = x_.size();
  std::vector<double> k(n * n);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j <= i; ++j)
      k[i * n + j] = covariance(x_[i], x_[j]) + (i == j ? kernel_.noise : 0);
  factor_ = cholesky(std::move(k), n);
  const std::vector<double> half = solve_lower(factor_, residuals_);
  weights_ = solve_upper(factor_, half);
  // The variance that is most probable after an inverse gamma prior.
  const double points = static_cast<double>(n) + kPriorPoints;
  variance_ =
      (dot(half, half) + kPriorPoints * prior_.deviation * prior_.deviation) /
      points;
  double density = -0.5 * points * std::log(variance_);
  for (size_t i = 0; i < n; ++i) density -= std::log(factor_[i * n + i]);
  for (const double s : kernel_.scales)
    density += log_normal(s, kUsualScale, kScaleSpread);
  return density + log_normal(kernel_.noise, kUsualNoise, kNoiseSpread);
}

void GaussianProcess::search() {
  constexpr int kPasses = 3;
  Kernel best{
      std::vector<double>(x_[0].size(), prior_.scale.value_or(kUsualScale)),
      kNoises[1]};
  double density = use(best);
  const auto keep_best = [&](double* value, double candidate) {
    const double before = *value;
    if (candidate == before) return;
    *value = candidate;
    if (const double d = use(best); d > density)
      density = d;
    else
      *value = before;
  };
  for (int pass = 0; pass < kPasses; ++pass) {
    for (double& scale : best.scales)
      for (const double s : kScales)
        if (!prior_.scale) keep_best(&scale, s);
    for (const double noise : kNoises) keep_best(&best.noise, noise);
  }
  use(best);
}

GaussianProcess::Prediction GaussianProcess::predict(const Features& at) const {
  std::vector<double> k;
  k.reserve(x_.size());
  for (const Features& x : x_) k.push_back(covariance(at, x));
  const std::vector<double> half = solve_lower(factor_, k);
  return {
      .mean = mean_ + dot(k, weights_),
      .deviation = std::sqrt(variance_ * std::max(0.0, 1 - dot(half, half)))};
}

}  // namespace remesh::tune
