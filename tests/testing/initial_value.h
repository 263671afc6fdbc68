// One initial weight, as ShardTable::initial_values() makes them row by row.
#pragma once

#include <cstdint>

#include "parallel/geometry/param_table.h"
#include "proto/base/rng.h"

namespace remesh::geometry {

// Of element e of that parameter.
inline float initial_value(const ParamSpec& s, uint64_t seed, int64_t e) {
  if (s.init != Init::kNormal) return s.init == Init::kOnes ? 1.0F : 0.0F;
  return static_cast<float>(s.init_std) *
         random_normal(seed, hash64(s.name), static_cast<uint64_t>(e));
}

}  // namespace remesh::geometry
