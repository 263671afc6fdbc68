#include "worker/sample/choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "proto/base/check.h"

namespace remesh::sample {
namespace {

using Order = std::vector<int32_t>;

// Keeps the fewest that have at least `share` of all the weights in `order`,
// the most likely ones, at least one. A sort would take longer than a small
// model needs for a token.
template <typename Before>
void keep_share(Order& order, const std::vector<float>& weights, double share,
                const Before& before) {
  const auto weight_of = [&](auto from, auto to) {
    double sum = 0;
    for (; from != to; ++from) sum += weights[static_cast<size_t>(*from)];
    return sum;
  };
  const double all = weight_of(order.begin(), order.end());
  // Together those below it have less than the rest of the share.
  const double rare = (1 - share) * all / static_cast<double>(order.size());
  std::erase_if(order, [&](int32_t token) {
    return weights[static_cast<size_t>(token)] < rare;
  });
  double missing = share * all;
  auto first = order.begin();  // all before it are needed
  auto last = order.end();     // and none from here on
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, before);
    const double likelier = weight_of(first, middle);
    if (likelier >= missing) {
      last = middle;
    } else {
      missing -= likelier;
      first = middle;
    }
  }
  order.erase(last, order.end());
}

}  // namespace

int32_t choose(std::span<const float> logits, const ChoiceOptions& o,
               double random) {
  CHECK(!logits.empty());
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (o.temperature == 0) return static_cast<int32_t>(largest - logits.begin());
  std::vector<float> weights;
  weights.reserve(logits.size());
  for (const float x : logits)
    weights.push_back(
        std::exp(static_cast<float>((x - *largest) / o.temperature)));
  const auto before = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  Order order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (o.top_k > 0 && o.top_k < std::ssize(order)) {
    std::nth_element(order.begin(), order.begin() + o.top_k, order.end(),
                     before);
    order.resize(static_cast<size_t>(o.top_k));
  }
  if (o.top_p < 1) keep_share(order, weights, o.top_p, before);
  if (order.size() < weights.size()) {
    const int32_t last = *std::max_element(order.begin(), order.end(), before);
    for (size_t i = 0; i < weights.size(); ++i)
      if (before(last, static_cast<int32_t>(i))) weights[i] = 0;
  }
  double left = random * std::accumulate(weights.begin(), weights.end(), 0.0);
  size_t chosen = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    chosen = i;
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return static_cast<int32_t>(chosen);
}

}  // namespace remesh::sample
