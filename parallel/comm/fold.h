// fold: the arithmetic of every reduction. Private to parallel/comm.
//
// The one order of reduction: for each element, ((x_0 + x_1) + x_2) + ... by
// rank. It depends on nothing else, so the bits of a sum are independent of
// the element count, of how gradients are bucketed, of timing and of which
// host a rank runs on, and every rank and implementation gets the same ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::comm {

// acc[i] = acc[i] op in[i]. The maximum or minimum of anything and NaN is NaN.
template <typename T>
void combine(Op op, T* __restrict__ acc, const T* __restrict__ in, size_t n) {
  switch (op) {
    case Op::kSum:
      for (size_t i = 0; i < n; ++i) acc[i] += in[i];
      return;
    case Op::kMax:
      for (size_t i = 0; i < n; ++i)
        acc[i] = (acc[i] < in[i] || in[i] != in[i]) ? in[i] : acc[i];
      return;
    case Op::kMin:
      for (size_t i = 0; i < n; ++i)
        acc[i] = (in[i] < acc[i] || in[i] != in[i]) ? in[i] : acc[i];
      return;
  }
}

// out[i] = parts[0][i] op parts[1][i] op ..., left to right, in one pass over
// memory. `out` may be one of the parts.
template <typename T>
void fold(Op op, std::span<const T* const> parts, T* out, size_t n) {
  constexpr size_t kTile = 2048;
  T tile[kTile];
  for (size_t at = 0; at < n; at += kTile) {
    const size_t len = std::min(kTile, n - at);
    std::copy_n(parts[0] + at, len, tile);
    for (size_t p = 1; p < parts.size(); ++p)
      combine(op, tile, parts[p] + at, len);
    std::copy_n(tile, len, out + at);
  }
}

}  // namespace remesh::comm
