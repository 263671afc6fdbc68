// WholeVector: a vector over the model's parameters (as the ParamTable lays
// them out), gathered from, or distributed to, the ranks of a mesh.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "parallel/geometry/shard_table.h"

namespace remesh::engine {

// Calls f(whole, part) for each of the elements [begin, begin + size) of a
// rank's flat vector: its index in the full vector, and in that range.
void for_each_element(const geometry::ShardTable& shard, int64_t begin,
                      int64_t size,
                      const std::function<void(size_t, size_t)>& f);

class WholeVector {
 public:
  explicit WholeVector(const geometry::ParamTable& table);
  // `part`: elements of a rank's flat vector from `begin` on.
  void add(const geometry::ShardTable& shard, int64_t begin,
           std::span<const float> part);
  const std::vector<float>& values() const { return values_; }
  // Empty, or that some element was never added, or added with different bits.
  std::string trouble() const;

 private:
  const geometry::ParamTable& table_;
  std::vector<float> values_;
  std::vector<bool> seen_;
  std::string differs_;
};

}  // namespace remesh::engine
