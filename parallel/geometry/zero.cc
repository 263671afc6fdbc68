#include "parallel/geometry/zero.h"

#include <fmt/format.h>

#include <algorithm>

namespace remesh::geometry {
namespace {

FlatRange moved(FlatRange r, int64_t by) { return {r.begin + by, r.end + by}; }

}  // namespace

int64_t share_length(int64_t n, int parts) {
  CHECK(n >= 0 && parts >= 1);
  const int64_t each = (n + parts - 1) / parts;
  return (each + 15) / 16 * 16;
}

FlatRange share_of(int64_t n, int parts, int index) {
  CHECK(index >= 0 && index < parts);
  const int64_t each = share_length(n, parts);
  return {std::min(n, each * index), std::min(n, each * (index + 1))};
}

Result<ZeroPlan> ZeroPlan::make(const ShardTable& shard,
                                const ZeroOptions& options, int n, int index) {
  CHECK(n >= 1 && index >= 0 && index < n);
  if (options.stage < 0 || options.stage > 3)
    return invalid_argument(
        fmt::format("ZeRO stage {}: allowed: 0 to 3", options.stage));
  if (options.shard_group < 0 ||
      (options.shard_group > 0 && n % options.shard_group != 0))
    return invalid_argument(fmt::format(
        "ZeRO shard group of {}: must divide the {} data-parallel ranks (dp x "
        "cp); 0: all of them",
        options.shard_group, n));
  ZeroPlan p;
  p.stage_ = options.stage;
  p.n_ = n;
  p.index_ = index;
  p.z_ = options.stage == 0        ? 1
         : options.shard_group > 0 ? options.shard_group
                                   : n;
  p.offsets_.push_back(0);
  for (const Unit& u : shard.units()) {
    const FlatRange update = share_of(u.numel(), p.z_, index % p.z_);
    const FlatRange counted =
        share_of(update.size(), p.n_ / p.z_, index / p.z_);
    p.update_.push_back(moved(update, u.begin));
    p.norm_.push_back(moved(counted, u.begin + update.begin));
    p.offsets_.push_back(p.offsets_.back() + update.size());
  }
  return p;
}

}  // namespace remesh::geometry
