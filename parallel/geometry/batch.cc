#include "parallel/geometry/batch.h"

#include <algorithm>
#include <numeric>

#include "proto/base/check.h"

namespace remesh::geometry {

MicrobatchRange even_share(int64_t n, int parts, int index) {
  CHECK(n >= 0 && index >= 0 && index < parts);
  const int64_t each = n / parts;
  const int64_t more = n % parts;  // parts with one element more
  const int64_t begin = index * each + std::min<int64_t>(index, more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

Shares shares_by_speed(int64_t n, const std::vector<double>& speeds) {
  CHECK(!speeds.empty() && n >= static_cast<int64_t>(speeds.size()));
  constexpr double kWorthwhile = 0.95;
  Shares shares(speeds.size(), 1);
  for (auto left = n - static_cast<int64_t>(shares.size()); left > 0; --left) {
    size_t first = 0;  // to be ready with one more
    const auto ready = [&](size_t i) {
      return static_cast<double>(shares[i] + 1) / speeds[i];
    };
    for (size_t i = 1; i < shares.size(); ++i)
      if (ready(i) < ready(first)) first = i;
    ++shares[first];
  }
  if (slowest_share(n, shares, speeds) >
      kWorthwhile * slowest_share(n, {}, speeds))
    return {};
  return shares;
}

double slowest_share(int64_t n, const Shares& shares,
                     const std::vector<double>& speeds) {
  const auto parts = static_cast<int>(speeds.size());
  double slowest = 0;
  for (int i = 0; i < parts; ++i)
    slowest = std::max(
        slowest, static_cast<double>(share_of(n, shares, parts, i).size()) /
                     speeds[static_cast<size_t>(i)]);
  return slowest;
}

MicrobatchRange share_of(int64_t n, const Shares& shares, int parts,
                         int index) {
  if (shares.empty()) return even_share(n, parts, index);
  CHECK(static_cast<int>(shares.size()) == parts && index >= 0 &&
        index < parts &&
        std::accumulate(shares.begin(), shares.end(), int64_t{0}) == n);
  const int64_t begin =
      std::accumulate(shares.begin(), shares.begin() + index, int64_t{0});
  return {begin, begin + shares[static_cast<size_t>(index)]};
}

int64_t largest_share(int64_t n, const Shares& shares, int parts) {
  if (shares.empty()) return even_share(n, parts, 0).size();
  return *std::max_element(shares.begin(), shares.end());
}

}  // namespace remesh::geometry
