// UnitLayout: where units stand in a vector in which each is padded to whole
// shares, so that shares can be gathered and scattered in place. Pure.
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
  // First element of unit u, elements with its padding, elements of a share.
  int64_t offset(size_t u) const { return offset_[u]; }
  int64_t length(size_t u) const { return share_[u] * shares_; }
  int64_t share(size_t u) const { return share_[u]; }
  int64_t total() const { return offset_.back(); }

 private:
  int shares_;
  std::vector<int64_t> offset_, share_;
};

}  // namespace remesh::engine
