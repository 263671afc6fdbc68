// The memory of a rank by purpose, as predicted or as measured.
#pragma once

#include <cstdint>

namespace remesh {

struct MemoryUse {  // bytes
  uint64_t weights = 0;
  uint64_t gradients = 0;
  uint64_t optimizer = 0;
  uint64_t activations = 0;
  uint64_t buffers = 0;  // packed weights, messages, scratch
  uint64_t total() const {
    return weights + gradients + optimizer + activations + buffers;
  }
  friend bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

}  // namespace remesh
