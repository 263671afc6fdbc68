#include "worker/sample/choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "proto/base/check.h"

namespace remesh::sample {

int32_t choose(std::span<const float> logits, const ChoiceOptions& o,
               double random) {
  CHECK(!logits.empty());
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (o.temperature == 0) return static_cast<int32_t>(largest - logits.begin());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (o.top_k > 0 && o.top_k < static_cast<int64_t>(order.size())) {
    std::nth_element(order.begin(), order.begin() + o.top_k, order.end(),
                     before);
    order.resize(static_cast<size_t>(o.top_k));
  }
  if (o.top_p < 1) std::sort(order.begin(), order.end(), before);
  std::vector<double> weights;
  double sum = 0;
  for (const int32_t token : order) {
    weights.push_back(std::exp((logits[static_cast<size_t>(token)] - *largest) /
                               o.temperature));
    sum += weights.back();
  }
  if (o.top_p < 1) {
    double kept = 0;
    size_t n = 0;
    while (n < weights.size() && (n == 0 || kept < o.top_p * sum))
      kept += weights[n++];
    weights.resize(n);
    sum = kept;
  }
  double left = random * sum;
  size_t i = 0;
  while (i + 1 < weights.size() && left >= weights[i]) left -= weights[i++];
  return order[i];
}

}  // namespace remesh::sample
