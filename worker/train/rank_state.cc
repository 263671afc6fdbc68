#include "worker/train/rank_state.h"

namespace remesh::train {
namespace {

using geometry::FlatRange;
using geometry::ShardTable;
using geometry::ZeroPlan;

void add_pieces(const ShardTable& shard, const ZeroPlan& zero, size_t unit,
                const std::vector<geometry::Piece>& pieces,
                std::vector<StatePiece>& out) {
  const int64_t moved = zero.state_offset(unit) - zero.update_range(unit).begin;
  for (const geometry::Piece& p : pieces)
    out.push_back(
        {.param = p.param,
         .box = p.box,
         .at = p.flat_begin + moved,
         .row_stride = shard[shard.param_at(p.flat_begin)].columns()});
}

}  // namespace

std::vector<StatePiece> pieces_to_save(const ShardTable& shard,
                                       const ZeroPlan& zero) {
  std::vector<StatePiece> out;
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const FlatRange r = zero.norm_range(u);
    add_pieces(shard, zero, u, shard.owned_pieces(r.begin, r.end), out);
  }
  return out;
}

std::vector<StatePiece> pieces_to_load(const ShardTable& shard,
                                       const ZeroPlan& zero) {
  std::vector<StatePiece> out;
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const FlatRange r = zero.norm_range(u);
    add_pieces(shard, zero, u, shard.pieces(r.begin, r.end), out);
  }
  return out;
}

std::vector<StatePiece> packed(const std::vector<StatePiece>& pieces,
                               int64_t* num_elements) {
  std::vector<StatePiece> out = pieces;
  int64_t at = 0;
  for (StatePiece& p : out) {
    p.at = at;
    p.row_stride = p.box.count.back();
    at += p.box.numel();
  }
  *num_elements = at;
  return out;
}

}  // namespace remesh::train
