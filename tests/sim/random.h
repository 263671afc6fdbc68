// Random numbers of one kind of fault. Each kind has a sequence of its own, so
// that the runs of existing seeds do not change when another one is added.
// Without a seed every number is 0, and nothing happens by chance.
#pragma once

#include <cstdint>
#include <optional>
#include <random>

namespace remesh::sim {

class Random {
 public:
  Random() = default;
  explicit Random(uint64_t seed) : engine_(seed) {}
  // 0 to n - 1.
  int64_t below(int64_t n) {
    return engine_
               ? static_cast<int64_t>((*engine_)() % static_cast<uint64_t>(n))
               : 0;
  }
  // Bounds included.
  int64_t uniform(int64_t low, int64_t high) {
    return engine_ ? low + below(high - low + 1) : 0;
  }
  bool chance(double p) {
    return engine_ && static_cast<double>((*engine_)() >> 11) * 0x1p-53 < p;
  }

 private:
  std::optional<std::mt19937_64> engine_;
};

}  // namespace remesh::sim
