#include "parallel/geometry/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "proto/base/rng.h"

namespace remesh::geometry {
namespace {

int data_ranks(const Layout& l) { return l.dp * l.cp; }

// The ranks that one copy of a shard is partitioned over.
int shares(const Sharding& s) {
  if (s.zero.stage == 0) return 1;
  return s.zero.shard_group > 0 ? s.zero.shard_group : data_ranks(s.layout);
}

// The pieces of range(unit) of each unit, or of its parameters that the rank
// owns, at their places in the state vectors.
template <typename Range>
std::vector<Piece> collect(const RankShard& rank, bool owned,
                           const Range& range) {
  std::vector<Piece> out;
  for (size_t u = 0; u < rank.shard.units().size(); ++u) {
    const FlatRange r = range(u);
    const int64_t moved =
        rank.zero.state_offset(u) - rank.zero.update_range(u).begin;
    for (Piece& p : rank.shard.pieces(r.begin, r.end, owned)) {
      p.at += moved;
      out.push_back(p);
    }
  }
  return out;
}

}  // namespace

Result<RankShard> make_rank_shard(const ParamTable& table,
                                  const Sharding& sharding, int rank) {
  const Layout& l = sharding.layout;
  RETURN_IF_ERROR(validate_layout(table.config(), l));
  if (rank < 0 || rank >= l.world())
    return invalid_argument(fmt::format("rank {}: {} has ranks 0 to {}", rank,
                                        l.to_string(), l.world() - 1));
  const Coord c = l.coord(rank);
  ASSIGN_OR_RETURN(
      ShardTable shard,
      ShardTable::make(table, l, c, sharding.bounds, sharding.chunks));
  ASSIGN_OR_RETURN(
      ZeroPlan zero,
      ZeroPlan::make(shard, sharding.zero, data_ranks(l), c.dp * l.cp + c.cp));
  return RankShard{std::move(shard), std::move(zero)};
}

int replica_group(const Sharding& s, int rank) {
  const Coord c = s.layout.coord(rank);
  const int z = shares(s);
  return (c.pp * s.layout.tp + c.tp) * z + (c.dp * s.layout.cp + c.cp) % z;
}

int num_replica_groups(const Sharding& s) {
  return s.layout.pp * s.layout.tp * shares(s);
}

int first_rank_of_group(const Sharding& s, int group) {
  CHECK(group >= 0 && group < num_replica_groups(s));
  const int z = shares(s);
  const int index = group % z;
  const int shard = group / z;
  return s.layout.rank({.dp = index / s.layout.cp,
                        .pp = shard / s.layout.tp,
                        .tp = shard % s.layout.tp,
                        .cp = index % s.layout.cp});
}

std::vector<Piece> held_pieces(const RankShard& rank) {
  return collect(rank, /*owned=*/false,
                 [&](size_t u) { return rank.zero.update_range(u); });
}

std::vector<Piece> pieces_to_save(const RankShard& rank) {
  return collect(rank, /*owned=*/true,
                 [&](size_t u) { return rank.zero.norm_range(u); });
}

std::vector<Piece> pieces_to_load(const RankShard& rank) {
  return collect(rank, /*owned=*/false,
                 [&](size_t u) { return rank.zero.norm_range(u); });
}

Status check_complete(const ParamTable& table, const Sharding& sharding,
                      std::span<const int> ranks) {
  RETURN_IF_ERROR(make_rank_shard(table, sharding, 0).status());
  std::vector<bool> there(static_cast<size_t>(num_replica_groups(sharding)));
  for (const int r : ranks) {
    if (r < 0 || r >= sharding.layout.world())
      return invalid_argument(fmt::format("rank {}: {} has ranks 0 to {}", r,
                                          sharding.layout.to_string(),
                                          sharding.layout.world() - 1));
    there[static_cast<size_t>(replica_group(sharding, r))] = true;
  }
  if (std::ranges::find(there, false) == there.end()) return ok_status();
  // A missing group may hold nothing that others do not.
  std::vector<Uncovered> left;
  for (const ParamSpec& spec : table.specs())
    left.emplace_back(full_rect(spec));
  for (size_t g = 0; g < there.size(); ++g) {
    if (!there[g]) continue;
    ASSIGN_OR_RETURN(
        const RankShard rank,
        make_rank_shard(table, sharding,
                        first_rank_of_group(sharding, static_cast<int>(g))));
    for (const Piece& p : held_pieces(rank))
      left[p.param].cover(p.rect, [](const Rect&) {});
  }
  for (size_t i = 0; i < table.size(); ++i)
    if (!left[i].empty())
      return unavailable(fmt::format("{} from row {}, column {} is missing",
                                     table[i].name, left[i].first().row,
                                     left[i].first().col));
  return ok_status();
}

std::vector<Piece> packed(const std::vector<Piece>& pieces,
                          int64_t* num_elements) {
  std::vector<Piece> out = pieces;
  int64_t at = 0;
  for (Piece& p : out) {
    p.at = at;
    p.row_stride = p.rect.cols;
    at += p.rect.numel();
  }
  *num_elements = at;
  return out;
}

uint64_t model_id(const ParamTable& table) {
  std::string text;
  for (const ParamSpec& s : table.specs())
    text += fmt::format("{} {}\n", s.name, fmt::join(s.shape, ","));
  return hash64(text);
}

}  // namespace remesh::geometry
