// Slices: the part of each parameter that a rank holds. Pure integer geometry;
// everything that moves state (checkpoint, exchange, replicas) plans with it.
//
// There are two ways to name a part of the model's state:
//   Rect       a rectangle of one parameter
//   FlatRange  consecutive elements of a flat vector of many parameters
// A Piece ties them together.
//
// Under pipeline parallelism a stage holds its own layers' parameters; under
// tensor parallelism a rank holds one rectangle of each split parameter and all
// of the others. Data and context parallelism replicate.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/layout.h"
#include "parallel/geometry/param_table.h"
#include "parallel/geometry/rect.h"

namespace remesh::geometry {

// All of a parameter.
Rect full_rect(const ParamSpec& spec);

struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

// A rectangle of a parameter and its place in a flat vector.
struct Piece {
  size_t param = 0;  // in the ParamTable
  Rect rect;
  int64_t at = 0;          // its first element in the vector
  int64_t row_stride = 0;  // elements between its rows
  // Where a part of it starts in the vector.
  int64_t position(const Rect& part) const {
    return at + (part.row - rect.row) * row_stride + (part.col - rect.col);
  }
  friend bool operator==(const Piece&, const Piece&) = default;
};

// Every parameter at its offset in the table's flat vector.
std::vector<Piece> whole_pieces(const ParamTable& table);

// First layer of each stage, and n_layers last: stage s has the blocks
// [first[s], first[s + 1]). Made by split_layers (schedule.h).
using StageBounds = std::vector<int64_t>;

// Whether the layout can shard the model: tp must divide n_heads, and divide
// n_kv_heads or be a multiple of it (so that a rank has complete groups of
// query heads with their key/value head, or a part of one group), and be at
// most hidden_dim and vocab_size; pp is at most n_layers. The message lists the
// allowed degrees.
Status validate_layout(const ModelConfig& config, const Layout& layout);

// Whether pipeline stage `stage` holds a parameter: embedding on the first,
// final norm and head on the last, blocks by `bounds`. Both ends hold a tied
// embedding.
bool on_stage(const ParamSpec& spec, bool tied, const StageBounds& bounds,
              int stage);

// The rectangle of a parameter that tensor-parallel rank tp_index of tp holds:
// units of split_unit are assigned in order, and the first ranks have one more
// when tp does not divide them (a vocabulary of 257 over 2 is 129 and 128
// rows). A parameter that is not split is held in full.
// REQUIRES: validate_layout passed.
Rect tp_rect(const ParamSpec& spec, int tp, int tp_index);

}  // namespace remesh::geometry
