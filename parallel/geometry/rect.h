// Rect: a rectangle of a parameter in rows and columns. A parameter of one dim
// is a single row. Pure.
//
// Uncovered is the core of resharding (reshard.h) and of every check that a
// state is complete.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace remesh::geometry {

struct Rect {
  int64_t row = 0, col = 0;    // first
  int64_t rows = 0, cols = 0;  // extent
  bool empty() const { return rows <= 0 || cols <= 0; }
  int64_t numel() const { return empty() ? 0 : rows * cols; }
  friend bool operator==(const Rect&, const Rect&) = default;
};

// Empty when they do not meet.
inline Rect intersect(const Rect& a, const Rect& b) {
  const int64_t row = std::max(a.row, b.row);
  const int64_t col = std::max(a.col, b.col);
  return {row, col, std::min(a.row + a.rows, b.row + b.rows) - row,
          std::min(a.col + a.cols, b.col + b.cols) - col};
}

// Appends `a` without `part`: disjoint, at most four.
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

// The part of a rectangle that nothing has covered yet.
class Uncovered {
 public:
  explicit Uncovered(const Rect& rect) {
    if (!rect.empty()) rects_.push_back(rect);
  }
  bool empty() const { return rects_.empty(); }
  // REQUIRES: !empty().
  const Rect& first() const { return rects_.front(); }
  // Calls f(part) for each uncovered part inside `rect`, and covers it.
  template <typename F>
  void cover(const Rect& rect, const F& f) {
    std::vector<Rect> left;
    for (const Rect& r : rects_) {
      const Rect part = intersect(r, rect);
      if (part.empty()) {
        left.push_back(r);
        continue;
      }
      f(part);
      subtract(r, part, left);
    }
    rects_ = std::move(left);
  }

 private:
  std::vector<Rect> rects_;  // disjoint
};

}  // namespace remesh::geometry
