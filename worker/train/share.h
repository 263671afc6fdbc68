// Share: an even part of a flat vector for each rank of a group. Parts are of
// one length (a multiple of 16 elements, one cache line of fp32) but for the
// last ones, which may be short or empty, so that they can be gathered in
// place.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/check.h"

namespace remesh::train {

struct Share {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Share&, const Share&) = default;
};

// Elements of every full part. REQUIRES: n >= 0, parts >= 1.
inline int64_t share_length(int64_t n, int parts) {
  CHECK(n >= 0 && parts >= 1);
  const int64_t each = (n + parts - 1) / parts;
  return (each + 15) / 16 * 16;
}

// REQUIRES: 0 <= index < parts.
inline Share share_of(int64_t n, int parts, int index) {
  CHECK(index >= 0 && index < parts);
  const int64_t each = share_length(n, parts);
  return {std::min(n, each * index), std::min(n, each * (index + 1))};
}

}  // namespace remesh::train
