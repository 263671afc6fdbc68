// RankState: the training state that one rank of a mesh holds, and which parts
// of which parameters its elements are. The bridge between a rank's vectors and
// anything that is the same on every mesh (checkpoints).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/store/store.h"
#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/zero.h"

namespace remesh::train {

// A view: borrows all of it. The vectors have zero->state_elements() elements
// in the order of ZeroPlan::state_offset.
struct RankState {
  int64_t step = 0;  // updates made
  const geometry::ShardTable* shard = nullptr;
  const geometry::ZeroPlan* zero = nullptr;
  std::span<float> weights, exp_avg, exp_avg_sq;
};

// A box of a parameter and where it stands in the state vectors.
struct StatePiece {
  size_t param = 0;  // in the ParamTable
  geometry::Box box;
  int64_t at = 0;          // its first element
  int64_t row_stride = 0;  // elements between its rows
};

// What this rank saves: over all ranks every element of the model once.
std::vector<StatePiece> pieces_to_save(const geometry::ShardTable& shard,
                                       const geometry::ZeroPlan& zero);
// What this rank reads: its part (ZeroPlan::norm_range) of what it and its
// replicas hold, also of parameters that another rank saves.
std::vector<StatePiece> pieces_to_load(const geometry::ShardTable& shard,
                                       const geometry::ZeroPlan& zero);

// As checkpoint/store wants them. T: const float to save, float to load.
template <typename T>
std::vector<store::Piece<T>> store_pieces(const geometry::ParamTable& table,
                                          const std::vector<StatePiece>& pieces,
                                          std::span<T> weights,
                                          std::span<T> exp_avg,
                                          std::span<T> exp_avg_sq) {
  std::vector<store::Piece<T>> out;
  for (const StatePiece& p : pieces)
    out.push_back({.slice = manifest::make_slice(table[p.param], p.box),
                   .weights = weights.data() + p.at,
                   .exp_avg = exp_avg.data() + p.at,
                   .exp_avg_sq = exp_avg_sq.data() + p.at,
                   .row_stride = p.row_stride});
  return out;
}

// Elements that pieces_to_save() covers, packed one piece after the other: the
// pieces again, standing in such a packed vector.
std::vector<StatePiece> packed(const std::vector<StatePiece>& pieces,
                               int64_t* num_elements);

}  // namespace remesh::train
