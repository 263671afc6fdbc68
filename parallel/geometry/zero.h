// ZeroPlan: which elements of its shard a data-parallel rank updates, stores
// and counts (ZeRO, Rajbhandari et al. 2020; hybrid sharding, Zhao et al.
// 2023). Pure.
//
// The ranks that hold the same shard (data- and context-parallel: the data
// group, n of them, indexed dp_i * cp + cp_i) are divided into shard groups of
// z neighbours. Inside a shard group each rank updates its share of every unit;
// the n / z shard groups are replicas of each other.
//
//   stage 0  every rank stores and updates everything (z = 1)
//   stage 1  optimizer state and master weights are sharded
//   stage 2  gradients are, too: reduce-scattered as they become ready
//   stage 3  weights are, too: gathered unit by unit, freed after use
//
// A unit of u elements has shares of share_length(u, z) elements, the last ones
// short or empty (share_of). The squares of the gradient are summed over
// norm_range(), which does not depend on the stage, so with one shard group
// neither do the bits of its norm.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/shard_table.h"

namespace remesh::geometry {

// Elements of a full share: a multiple of 16 (one cache line of fp32), so that
// shares can be gathered in place. REQUIRES: n >= 0, parts >= 1.
int64_t share_length(int64_t n, int parts);
// Share `index` of `parts` of [0, n). REQUIRES: 0 <= index < parts.
FlatRange share_of(int64_t n, int parts, int index);

struct ZeroOptions {
  int stage = 0;        // 0 to 3
  int shard_group = 0;  // z, a divisor of n; 0: the data group
  friend bool operator==(const ZeroOptions&, const ZeroOptions&) = default;
};

class ZeroPlan {
 public:
  // For a rank with index `index` of a data group of `n`. Fails when the stage
  // is not 0..3 or shard_group does not divide n.
  static Result<ZeroPlan> make(const ShardTable& shard,
                               const ZeroOptions& options, int n, int index);

  int stage() const { return stage_; }
  int group_size() const { return n_; }
  int index() const { return index_; }
  int shard_size() const { return z_; }  // 1 with stage 0
  int shard_index() const { return index_ % z_; }
  int num_replicas() const { return n_ / z_; }
  int replica_index() const { return index_ / z_; }

  // Flat elements (of the ShardTable) of unit u that this rank updates: all of
  // them with stage 0.
  FlatRange update_range(size_t u) const { return update_[u]; }
  // Their offset in the rank's state vectors (master weight, moments), which
  // hold the update ranges of all units one after the other.
  int64_t state_offset(size_t u) const { return offsets_[u]; }
  int64_t state_elements() const { return offsets_.back(); }
  // Flat elements of unit u whose gradient this rank counts and whose state it
  // saves: the data group covers each element once. Inside update_range(u).
  FlatRange norm_range(size_t u) const { return norm_[u]; }

 private:
  int stage_ = 0, n_ = 1, index_ = 0, z_ = 1;
  std::vector<FlatRange> update_, norm_;
  std::vector<int64_t> offsets_;
};

}  // namespace remesh::geometry
