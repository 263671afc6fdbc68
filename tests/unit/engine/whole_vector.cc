#include "tests/unit/engine/whole_vector.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace remesh::engine {

void for_each_element(const geometry::ShardTable& shard, int64_t begin,
                      int64_t size,
                      const std::function<void(size_t, size_t)>& f) {
  const geometry::ParamTable& table = shard.table();
  for (const geometry::Piece& p : shard.pieces(begin, begin + size)) {
    const int64_t stride = shard[shard.param_at(p.flat_begin)].columns();
    const bool matrix = p.box.count.size() == 2;
    const int64_t rows = matrix ? p.box.count[0] : 1;
    const int64_t first =
        table.offset(p.param) +
        (matrix ? p.box.start[0] * table[p.param].shape[1] + p.box.start[1]
                : p.box.start[0]);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < p.box.count.back(); ++k)
        f(static_cast<size_t>(first +
                              (matrix ? r * table[p.param].shape[1] : 0) + k),
          static_cast<size_t>(p.flat_begin - begin + r * stride + k));
  }
}

WholeVector::WholeVector(const geometry::ParamTable& table)
    : table_(table),
      values_(static_cast<size_t>(table.num_elements())),
      seen_(values_.size(), false) {}

void WholeVector::add(const geometry::ShardTable& shard, int64_t begin,
                      std::span<const float> part) {
  for_each_element(
      shard, begin, static_cast<int64_t>(part.size()),
      [&](size_t whole, size_t i) {
        if (seen_[whole] && std::bit_cast<uint32_t>(values_[whole]) !=
                                std::bit_cast<uint32_t>(part[i]))
          differs_ = table_[table_.param_at(static_cast<int64_t>(whole))].name;
        values_[whole] = part[i];
        seen_[whole] = true;
      });
}

std::string WholeVector::trouble() const {
  if (std::find(seen_.begin(), seen_.end(), false) != seen_.end())
    return "nobody holds some elements";
  return differs_.empty() ? "" : differs_ + " differs between ranks";
}

}  // namespace remesh::engine
