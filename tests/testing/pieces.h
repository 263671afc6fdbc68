// Pieces of a state, element by element and of the unsharded model.
#pragma once

#include <span>
#include <vector>

#include "parallel/geometry/shard_table.h"

namespace remesh::geometry {

// Calls f(position in the vector, parameter, its element) for each element, in
// the order of the pieces' rows.
template <typename F>
void for_each_element(const ParamTable& table, std::span<const Piece> pieces,
                      const F& f) {
  for (const Piece& p : pieces)
    for (int64_t r = 0; r < p.rect.rows; ++r)
      for (int64_t c = 0; c < p.rect.cols; ++c)
        f(p.at + r * p.row_stride + c, p.param,
          (p.rect.row + r) * table[p.param].shape.back() + p.rect.col + c);
}

// Elements [begin, end) of the table's canonical order, in a vector whose first
// element is `origin`.
inline std::vector<Piece> pieces_of_range(const ParamTable& table,
                                          int64_t begin, int64_t end,
                                          int64_t origin = 0) {
  const auto all =
      ShardTable::make(table, {}, {}, {0, table.config().n_layers}).value();
  std::vector<Piece> pieces = all.pieces(begin, end);
  for (Piece& p : pieces) p.at -= origin;
  return pieces;
}

}  // namespace remesh::geometry
