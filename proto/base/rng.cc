#include "proto/base/rng.h"

#include <Random123/philox.h>

#include <cmath>
#include <numbers>

#include "proto/base/xxh3.h"

namespace remesh {

std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_hi,
                               uint64_t counter_lo) {
  using Rng = r123::Philox4x32;
  const Rng::ctr_type c = {{static_cast<uint32_t>(counter_lo),
                            static_cast<uint32_t>(counter_lo >> 32),
                            static_cast<uint32_t>(counter_hi),
                            static_cast<uint32_t>(counter_hi >> 32)}};
  const Rng::key_type k = {
      {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}};
  const Rng::ctr_type r = Rng()(c, k);
  return {r[0], r[1], r[2], r[3]};
}

uint64_t random_u64(uint64_t key, uint64_t stream, uint64_t index) {
  const auto r = philox(key, stream, index);
  return (uint64_t{r[1]} << 32) | r[0];
}

namespace {

// Two normals from a block (Box-Muller): even elements take the cosine branch.
struct Polar {
  double radius;
  double angle;
  float even() const { return static_cast<float>(radius * std::cos(angle)); }
  float odd() const { return static_cast<float>(radius * std::sin(angle)); }
};

Polar polar(uint64_t key, uint64_t stream, uint64_t pair) {
  const auto r = philox(key, stream, pair);
  const double u1 = (static_cast<double>(r[0]) + 1.0) / 4294967297.0;
  const double u2 = static_cast<double>(r[1]) / 4294967296.0;
  return {std::sqrt(-2.0 * std::log(u1)), 2.0 * std::numbers::pi * u2};
}

}  // namespace

float random_normal(uint64_t key, uint64_t stream, uint64_t index) {
  const Polar p = polar(key, stream, index / 2);
  return index % 2 == 0 ? p.even() : p.odd();
}

void random_normals(uint64_t key, uint64_t stream, uint64_t index,
                    std::span<float> out) {
  size_t i = 0;
  if (index % 2 == 1 && !out.empty())
    out[i++] = random_normal(key, stream, index);
  for (; i + 1 < out.size(); i += 2) {
    const Polar p = polar(key, stream, (index + i) / 2);
    out[i] = p.even();
    out[i + 1] = p.odd();
  }
  if (i < out.size()) out[i] = random_normal(key, stream, index + i);
}

uint64_t hash64(std::string_view text) {
  return xxh3(text.data(), text.size());
}

}  // namespace remesh
