// RankState: the training state that one rank of a mesh holds. Which parts of
// which parameters its elements are: geometry/sharding.h. The bridge between a
// rank's vectors and checkpoints.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/store/store.h"
#include "parallel/geometry/sharding.h"

namespace remesh::train {

// A view to read: borrows all of it. The vectors have zero->state_elements()
// elements in the order of ZeroPlan::state_offset.
struct RankState {
  int64_t step = 0;  // updates made
  const geometry::ShardTable* shard = nullptr;
  const geometry::ZeroPlan* zero = nullptr;
  std::span<const float> weights, exp_avg, exp_avg_sq;
};

using geometry::packed;
using geometry::pieces_to_load;
using geometry::pieces_to_save;
using geometry::StatePiece;

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

}  // namespace remesh::train
