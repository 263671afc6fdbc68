// Which token follows, given the model's logits. Pure.
#pragma once

#include <cstdint>
#include <span>

namespace remesh::sample {

struct ChoiceOptions {
  // Logits are divided by it; 0: the most likely token, the first of equals.
  double temperature = 1;
  int64_t top_k = 0;  // only the most likely ones; 0: all
  // Only the most likely ones whose probabilities add up to it (nucleus
  // sampling, Holtzman et al. 2020), at least one.
  double top_p = 1;
};

// `random`: uniform in [0, 1). REQUIRES: there are logits, and none is NaN.
int32_t choose(std::span<const float> logits, const ChoiceOptions& options,
               double random);

}  // namespace remesh::sample
