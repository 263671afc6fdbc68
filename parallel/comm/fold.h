// fold: the arithmetic of every reduction. Private to parallel/comm.
//
// The one order of reduction: for each element, ((x_0 + x_1) + x_2) + ... by
// rank. It depends on nothing else, so the bits of a sum are independent of
// the element count, of how gradients are bucketed, of timing and of which
// host a rank runs on, and are the same on every rank and implementation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "parallel/comm/comm.h"

namespace remesh::comm {

// out[i] = a[i] op b[i]; `out` may be a or b. The maximum of any value and NaN
// is NaN.
template <typename T>
void combine_two(Op op, const T* a, const T* b, T* out, size_t n) {
  switch (op) {
    case Op::kSum:
      for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
      return;
    case Op::kMax:
      for (size_t i = 0; i < n; ++i)
        out[i] = (a[i] < b[i] || b[i] != b[i]) ? b[i] : a[i];
      return;
  }
}

// out[i] = parts[0][i] op parts[1][i] op ..., left to right, in one pass over
// memory. `out` may be one of the parts.
template <typename T>
void fold(Op op, std::span<const T* const> parts, T* out, size_t n) {
  constexpr size_t kTile = 2048;
  T tile[kTile];
  const size_t last = parts.size() - 1;
  for (size_t at = 0; at < n; at += kTile) {
    const size_t len = std::min(kTile, n - at);
    if (last == 0) {
      if (parts[0] != out) std::copy_n(parts[0] + at, len, out + at);
      continue;
    }
    const T* acc = parts[0] + at;
    for (size_t p = 1; p <= last; ++p) {
      // Only the last sum may go to `out`, which may be a part still unread.
      T* to = p == last ? out + at : tile;
      combine_two(op, acc, parts[p] + at, to, len);
      acc = tile;
    }
  }
}

}  // namespace remesh::comm
