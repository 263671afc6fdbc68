// RankState: a view of the training state of one rank, and its conversion to
// the pieces of a checkpoint. geometry/sharding.h defines which parts of which
// parameters its elements are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/store/store.h"
#include "parallel/geometry/sharding.h"

namespace remesh::train {

// A read-only view. The vectors have zero->state_elements() elements in the
// order of ZeroPlan::state_offset.
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

// Pieces for checkpoint/store. T is const float to save and float to load.
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
