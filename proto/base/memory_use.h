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

struct MemoryPurpose {
  const char* key;
  uint64_t MemoryUse::*bytes;
};
inline constexpr MemoryPurpose kMemoryPurposes[] = {
    {"weights", &MemoryUse::weights},
    {"gradients", &MemoryUse::gradients},
    {"optimizer", &MemoryUse::optimizer},
    {"activations", &MemoryUse::activations},
    {"buffers", &MemoryUse::buffers}};

// To and from pb::MemoryUse.
template <typename Message>
void to_message(const MemoryUse& m, Message* out) {
  out->set_weights(m.weights);
  out->set_gradients(m.gradients);
  out->set_optimizer(m.optimizer);
  out->set_activations(m.activations);
  out->set_buffers(m.buffers);
}
template <typename Message>
MemoryUse memory_of(const Message& m) {
  return {.weights = m.weights(),
          .gradients = m.gradients(),
          .optimizer = m.optimizer(),
          .activations = m.activations(),
          .buffers = m.buffers()};
}

}  // namespace remesh
