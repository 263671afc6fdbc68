#include "tests/unit/engine/whole_vector.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "tests/testing/pieces.h"

namespace remesh::engine {

void for_each_element(const geometry::ShardTable& shard, int64_t begin,
                      int64_t size,
                      const std::function<void(size_t, size_t)>& f) {
  const geometry::ParamTable& table = shard.table();
  geometry::for_each_element(table, shard.pieces(begin, begin + size),
                             [&](int64_t at, size_t param, int64_t e) {
                               f(static_cast<size_t>(table.offset(param) + e),
                                 static_cast<size_t>(at - begin));
                             });
}

namespace {

// The parameter that holds flat element e.
const geometry::ParamSpec& param_at(const geometry::ParamTable& table,
                                    int64_t e) {
  size_t i = table.size() - 1;
  while (table.offset(i) > e) --i;
  return table[i];
}

}  // namespace

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
          differs_ = param_at(table_, static_cast<int64_t>(whole)).name;
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
