// Sharding: how the training state of a model is cut over the ranks of a mesh,
// as one value: all that ShardTable and ZeroPlan are made of. It is written
// beside every state (in memory and on the wire), so that whoever finds the
// state knows what each rank's vectors hold without asking the writer. Pure.
//
// A StatePiece is a box of a parameter and where it stands in a rank's state
// vectors; lists of them are what every mover of state works on (checkpoint,
// replica, exchange between meshes).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/zero.h"

namespace remesh::geometry {

struct Sharding {
  Layout layout;
  StageBounds bounds;  // of all layout.pp * chunks virtual stages
  int chunks = 1;
  ZeroOptions zero;
  friend bool operator==(const Sharding&, const Sharding&) = default;
};

// What one rank of it holds. `shard` refers to the ParamTable it was made of.
struct RankShard {
  ShardTable shard;
  ZeroPlan zero;
};
// Fails like ShardTable::make and ZeroPlan::make, and when the mesh has no such
// rank.
Result<RankShard> make_rank_shard(const ParamTable& table,
                                  const Sharding& sharding, int rank);

// Ranks of one content class hold the same elements at the same places of
// their vectors (data-parallel ranks; with ZeRO those with the same share).
// Classes are numbered 0 .. num_content_classes() - 1.
// REQUIRES: make_rank_shard() succeeds.
int content_class(const Sharding& sharding, int rank);
int num_content_classes(const Sharding& sharding);
// The first rank of a class.
int first_of_class(const Sharding& sharding, int content);

struct StatePiece {
  size_t param = 0;  // in the ParamTable
  Box box;
  int64_t at = 0;          // its first element in the state vectors
  int64_t row_stride = 0;  // elements between its rows
  friend bool operator==(const StatePiece&, const StatePiece&) = default;
};

// Everything in the rank's state vectors, in their order.
std::vector<StatePiece> held_pieces(const ShardTable& shard,
                                    const ZeroPlan& zero);
// What this rank saves: over all ranks every element of the model once.
std::vector<StatePiece> pieces_to_save(const ShardTable& shard,
                                       const ZeroPlan& zero);
// What this rank reads from files: its part (ZeroPlan::norm_range) of what it
// and its replicas hold, also of parameters that another rank saves.
std::vector<StatePiece> pieces_to_load(const ShardTable& shard,
                                       const ZeroPlan& zero);

// Whether the states of these ranks together hold every element of the model,
// replicas and shared parameters counting for each other. Unavailable, naming
// what is missing, when not; else fails like make_rank_shard().
Status check_whole(const ParamTable& table, const Sharding& sharding,
                   std::span<const int> ranks);

// The same pieces, packed one after the other in a vector of *num_elements.
std::vector<StatePiece> packed(const std::vector<StatePiece>& pieces,
                               int64_t* num_elements);

// Identity of the model whose state it is: a hash of the names and shapes of
// all parameters.
uint64_t model_id(const ParamTable& table);

}  // namespace remesh::geometry
