// The statistic by which times and losses are judged.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace remesh {

// The value at that quantile, of two the larger one. REQUIRES: v is not empty.
inline double median(std::vector<double> v, double quantile = 0.5) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(
      std::lround(quantile * static_cast<double>(v.size() - 1)))];
}

}  // namespace remesh
