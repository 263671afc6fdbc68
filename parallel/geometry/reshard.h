// Resharding, as data: which part of which held piece fills which part of a
// wanted one. The planners of both kinds of source use it: checkpoint/manifest
// reads from files, checkpoint/exchange from memory. Pure.
//
// Invariant: exactly one copy fills every element of a wanted piece. It holds
// for any two shardings (the idea of PyTorch's distributed checkpoint planner).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/geometry/slice.h"

namespace remesh::geometry {

// A rectangle of one parameter, from the vector of one piece to the vector of
// another. Offsets and strides in elements.
struct Copy {
  int source = 0;
  int64_t from_at = 0, from_stride = 0;
  int64_t to_at = 0, to_stride = 0;
  int64_t rows = 0, cols = 0;
  int64_t numel() const { return rows * cols; }
  friend bool operator==(const Copy&, const Copy&) = default;
};

// The pieces that can be read, by parameter.
class HeldPieces {
 public:
  struct Held {
    Piece piece;
    int holder = 0;  // numbered by the caller
  };

  explicit HeldPieces(size_t num_params) : held_(num_params) {}
  void add(const Piece& piece, int holder) {
    held_[piece.param].push_back({piece, holder});
  }
  const std::vector<Held>& of(size_t param) const { return held_[param]; }

  // Covers what is left of `wanted`: calls emit(copy) for each part. Holders
  // are asked in the order in which they were added, from the first'th on (it
  // wraps around), so that readers can spread their load. source_of(holder)
  // gives the number of the source to read, or nullopt to pass over the holder.
  template <typename SourceOf, typename Emit>
  void fill(const Piece& wanted, size_t first, Uncovered& left,
            const SourceOf& source_of, const Emit& emit) const {
    const std::vector<Held>& held = held_[wanted.param];
    for (size_t k = 0; k < held.size() && !left.empty(); ++k) {
      const Held& h = held[(first + k) % held.size()];
      if (intersect(h.piece.rect, wanted.rect).empty()) continue;
      const std::optional<int> source = source_of(h.holder);
      if (!source) continue;
      left.cover(h.piece.rect, [&](const Rect& part) {
        emit(Copy{.source = *source,
                  .from_at = h.piece.position(part),
                  .from_stride = h.piece.row_stride,
                  .to_at = wanted.position(part),
                  .to_stride = wanted.row_stride,
                  .rows = part.rows,
                  .cols = part.cols});
      });
    }
  }

 private:
  std::vector<std::vector<Held>> held_;  // by parameter
};

}  // namespace remesh::geometry
