// Rect: a box of a parameter as rows and columns, whatever its dims (one of one
// dim is a single row), for those who cut many of them: no allocation. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel/geometry/slice.h"

namespace remesh::geometry {

struct Rect {
  int64_t row = 0, col = 0;    // first
  int64_t rows = 0, cols = 0;  // extent
  bool empty() const { return rows <= 0 || cols <= 0; }
  int64_t numel() const { return empty() ? 0 : rows * cols; }
  friend bool operator==(const Rect&, const Rect&) = default;
};

inline Rect rect_of(const Box& b) {
  if (b.count.size() == 1) return {0, b.start[0], 1, b.count[0]};
  return {b.start[0], b.start[1], b.count[0], b.count[1]};
}

// Empty when they do not meet.
inline Rect intersect(const Rect& a, const Rect& b) {
  const int64_t row = std::max(a.row, b.row);
  const int64_t col = std::max(a.col, b.col);
  return {row, col, std::min(a.row + a.rows, b.row + b.rows) - row,
          std::min(a.col + a.cols, b.col + b.cols) - col};
}

// Appends what is left of `a` without `part`: disjoint, at most four.
// REQUIRES: part lies inside a.
inline void subtract(const Rect& a, const Rect& part, std::vector<Rect>& out) {
  const auto add = [&](const Rect& r) {
    if (!r.empty()) out.push_back(r);
  };
  const int64_t below = part.row + part.rows;
  const int64_t right = part.col + part.cols;
  add({a.row, a.col, part.row - a.row, a.cols});
  add({part.row, a.col, part.rows, part.col - a.col});
  add({part.row, right, part.rows, a.col + a.cols - right});
  add({below, a.col, a.row + a.rows - below, a.cols});
}

}  // namespace remesh::geometry
