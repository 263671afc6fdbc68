// GaussianProcess: regression for some tens of points, with a confidence.
// Matern 5/2 kernel with a length scale for each feature, constant mean
// (Rasmussen and Williams 2006, Gaussian Processes for Machine Learning,
// algorithm 2.1 and section 5.4.1). Pure.
#pragma once

#include <optional>
#include <vector>

namespace remesh::tune {

using Features = std::vector<double>;

// What is assumed before the first point: it counts as kPriorPoints points.
struct Prior {
  double deviation = 1;  // of values from their mean
  // The mean of all values; without it, that of the values given.
  std::optional<double> mean;
  // The length scale of all features; without it, what fits best.
  std::optional<double> scale;
};

class GaussianProcess {
 public:
  struct Prediction {
    double mean = 0;
    double deviation = 0;  // of the function, without noise
  };

  // Features should be between 0 and 1. Length scales and the share of noise
  // are those of highest posterior density on a grid, found by coordinate
  // ascent, with log-normal priors. REQUIRES: as many values as rows, at least
  // one; rows of one size.
  GaussianProcess(std::vector<Features> x, const std::vector<double>& y,
                  const Prior& prior);

  Prediction predict(const Features& at) const;

 private:
  // Length scales of the features, and the variance of the noise relative to
  // that of the function.
  struct Kernel {
    std::vector<double> scales;
    double noise = 0;
  };
  double covariance(const Features& a, const Features& b) const;
  // Takes over the kernel and returns the logarithm of its posterior density,
  // but for a constant.
  double use(const Kernel& kernel);
  void search();

  std::vector<Features> x_;
  std::vector<double> residuals_;  // from the mean
  double mean_ = 0;
  Prior prior_;
  Kernel kernel_;
  std::vector<double> factor_;   // Cholesky factor, row by row, lower triangle
  std::vector<double> weights_;  // inverse covariance times residuals
  double variance_ = 1;          // of the function
};

}  // namespace remesh::tune
