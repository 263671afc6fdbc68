// Sharding: how the training state of a model is partitioned over the ranks of
// a mesh, as one value: everything that ShardTable and ZeroPlan are made from.
// It is stored beside every state (in memory and in messages), so that a reader
// knows what each rank's vectors hold without asking the writer. Pure.
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

// What one rank of it holds. `shard` refers to the ParamTable it was made from.
struct RankShard {
  ShardTable shard;
  ZeroPlan zero;
};
// Fails like ShardTable::make and ZeroPlan::make, and when the mesh has no such
// rank.
Result<RankShard> make_rank_shard(const ParamTable& table,
                                  const Sharding& sharding, int rank);

// A replica group (HSDP, Zhao et al. 2023): the ranks that hold the same
// elements at the same places of their vectors. These are the data-parallel
// ranks; with ZeRO those with the same share. Groups are numbered
// 0 .. num_replica_groups() - 1.
// REQUIRES: make_rank_shard() succeeds.
int replica_group(const Sharding& sharding, int rank);
int num_replica_groups(const Sharding& sharding);
int first_rank_of_group(const Sharding& sharding, int group);

// Everything in the rank's state vectors, in their order.
std::vector<Piece> held_pieces(const RankShard& rank);
// What this rank saves: over all ranks every element of the model once.
std::vector<Piece> pieces_to_save(const RankShard& rank);
// What this rank reads from files: its part (ZeroPlan::norm_range) of what it
// and its replicas hold, including parameters that another rank saves.
std::vector<Piece> pieces_to_load(const RankShard& rank);

// Whether the states of these ranks together hold every element of the model;
// replicas and shared parameters substitute for each other. Unavailable, naming
// what is missing, when not; else fails like make_rank_shard().
Status check_complete(const ParamTable& table, const Sharding& sharding,
                      std::span<const int> ranks);

// The same pieces, packed one after the other in a vector of *num_elements.
std::vector<Piece> packed(const std::vector<Piece>& pieces,
                          int64_t* num_elements);

// Identity of the model whose state it is: a hash of the names and shapes of
// all parameters.
uint64_t model_id(const ParamTable& table);

}  // namespace remesh::geometry
