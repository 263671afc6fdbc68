// UnitLayout: the offsets of units in a vector in which each unit is padded to
// equal shares, so that shares are gathered and scattered in place. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/zero.h"

namespace remesh::engine {

class UnitLayout {
 public:
  UnitLayout(const geometry::ShardTable& shard, int shares) : shares_(shares) {
    offset_.push_back(0);
    for (const geometry::Unit& u : shard.units()) {
      share_.push_back(geometry::share_length(u.numel(), shares));
      offset_.push_back(offset_.back() + share_.back() * shares);
    }
  }
  // Unit u: its first element, elements with padding, elements of a share.
  int64_t offset(size_t u) const { return offset_[u]; }
  int64_t length(size_t u) const { return share_[u] * shares_; }
  int64_t share(size_t u) const { return share_[u]; }
  int64_t total() const { return offset_.back(); }

 private:
  int shares_;
  std::vector<int64_t> offset_, share_;
};

}  // namespace remesh::engine
