#include "parallel/geometry/batch.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

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
  constexpr double kRounding = 1e-9;  // more than that of the quotients
  // Each microbatch goes to the rank that is ready first with one more. So no
  // rank gets fewer than it makes in a time in which all ranks together make
  // those that are left with one for each.
  const double most =
      (1 - kRounding) *
      static_cast<double>(n - static_cast<int64_t>(speeds.size()));
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  Shares shares;
  int64_t left = n;
  for (const double speed : speeds) {
    shares.push_back(
        std::max<int64_t>(1, static_cast<int64_t>(most * (speed / sum))));
    left -= shares.back();
  }
  using Ready = std::pair<double, size_t>;  // of several, the first rank
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
  const auto add = [&](size_t i) {
    ready.emplace(static_cast<double>(shares[i] + 1) / speeds[i], i);
  };
  for (size_t i = 0; i < shares.size(); ++i) add(i);
  for (; left > 0; --left) {
    const size_t i = ready.top().second;
    ready.pop();
    ++shares[i];
    add(i);
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
  for (int i = 0; i < parts; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t share =
        shares.empty() ? even_share(n, parts, i).size() : shares[at];
    slowest = std::max(slowest, static_cast<double>(share) / speeds[at]);
  }
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
  return *std::ranges::max_element(shares);
}

}  // namespace remesh::geometry
