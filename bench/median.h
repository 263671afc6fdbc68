// The statistic that benchmarks report.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace remesh::bench {

// The value at that quantile. REQUIRES: v is not empty.
inline double median(std::vector<double> v, double quantile = 0.5) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(
      std::lround(quantile * static_cast<double>(v.size() - 1)))];
}

}  // namespace remesh::bench
