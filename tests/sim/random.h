// Random numbers of one kind of fault. Each kind has a sequence of its own, so
// that the runs of existing seeds do not change when another one is added.
#pragma once

#include <cstdint>
#include <random>

namespace remesh::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // 0 to n - 1.
  int64_t below(int64_t n) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n));
  }
  // Bounds included.
  int64_t uniform(int64_t low, int64_t high) {
    return low + below(high - low + 1);
  }
  bool chance(double p) {
    return static_cast<double>(engine_() >> 11) * 0x1p-53 < p;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace remesh::sim
