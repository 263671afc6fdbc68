#include "parallel/geometry/shard_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "parallel/geometry/model_work.h"
#include "parallel/geometry/schedule.h"
#include "proto/base/rng.h"

namespace remesh::geometry {
namespace {

UnitKind unit_kind(Role role) {
  switch (role) {
    case Role::kEmbedding:
      return UnitKind::kEmbedding;
    case Role::kFinalNorm:
    case Role::kHead:
      return UnitKind::kHead;
    default:
      return UnitKind::kBlock;
  }
}

// Neighbouring tensor-parallel ranks that hold the same rectangle.
int sharing_ranks(const ParamSpec& spec, int tp) {
  if (spec.split == TensorSplit::kNone) return tp;
  if (!has_kv_heads(spec.role)) return 1;
  const int64_t heads = spec.shape[0] / spec.split_unit;
  return heads < tp ? static_cast<int>(tp / heads) : 1;
}

}  // namespace

Result<ShardTable> ShardTable::make(const ParamTable& table,
                                    const Layout& layout, const Coord& coord,
                                    const StageBounds& bounds, int chunks) {
  RETURN_IF_ERROR(validate_layout(table.config(), layout));
  const int stages = layout.pp * chunks;
  if (chunks < 1 || (chunks > 1 && layout.pp == 1) ||
      static_cast<int>(bounds.size()) != stages + 1 || bounds.front() != 0 ||
      bounds.back() != table.config().n_layers ||
      std::adjacent_find(bounds.begin(), bounds.end(),
                         std::greater_equal<>()) != bounds.end())
    return invalid_argument(fmt::format(
        "{} pipeline stages of {} chunks: bounds of {} stages do not fit",
        layout.pp, chunks, bounds.size() - 1));
  ShardTable t;
  t.table_ = &table;
  t.layout_ = layout;
  t.coord_ = coord;
  t.bounds_ = bounds;
  t.chunks_ = chunks;
  const bool tied = table.config().tie_embeddings;
  for (int c = 0; c < chunks; ++c) {
    const int stage = c * layout.pp + coord.pp;
    std::vector<size_t> held;
    for (size_t i = 0; i < table.size(); ++i)
      if (on_stage(table[i], tied, bounds, stage)) held.push_back(i);
    // A tied embedding on the last stage belongs to the head.
    const bool copy = tied && stage == stages - 1 && stages > 1 &&
                      table[held.front()].role == Role::kEmbedding;
    if (copy) std::rotate(held.begin(), held.begin() + 1, held.end());
    for (const size_t i : held) {
      const ParamSpec& spec = table[i];
      const bool tied_here =
          tied && spec.role == Role::kEmbedding && stages > 1;
      const UnitKind kind =
          tied_here && stage != 0 ? UnitKind::kHead : unit_kind(spec.role);
      if (t.units_.empty() || t.units_.back().kind != kind ||
          t.units_.back().chunk != c ||
          (kind == UnitKind::kBlock && t.units_.back().layer != spec.layer))
        t.units_.push_back({.kind = kind,
                            .chunk = c,
                            .layer = kind == UnitKind::kBlock ? spec.layer : -1,
                            .first = t.params_.size(),
                            .last = t.params_.size(),
                            .begin = t.num_elements_,
                            .end = t.num_elements_});
      ShardParam p{.param = i,
                   .rect = tp_rect(spec, layout.tp, coord.tp),
                   .offset = t.num_elements_,
                   .unit = static_cast<int>(t.units_.size()) - 1,
                   .tp_group = sharing_ranks(spec, layout.tp),
                   .tied_copy = tied_here && layout.pp > 1};
      p.owner = coord.tp % p.tp_group == 0 && !(tied_here && stage != 0);
      t.num_elements_ += p.numel();
      t.params_.push_back(p);
      t.units_.back().last = t.params_.size();
      t.units_.back().end = t.num_elements_;
    }
  }
  return t;
}

int64_t ShardTable::first_layer(int chunk) const {
  const int stage = chunk * layout_.pp + coord_.pp;
  return bounds_[static_cast<size_t>(stage)];
}

int64_t ShardTable::last_layer(int chunk) const {
  return bounds_[static_cast<size_t>(chunk * layout_.pp + coord_.pp) + 1];
}

bool ShardTable::has_embedding(int chunk) const {
  return chunk == 0 && coord_.pp == 0;
}

bool ShardTable::has_head(int chunk) const {
  return chunk == chunks_ - 1 && coord_.pp == layout_.pp - 1;
}

int ShardTable::find(Role role, int64_t layer) const {
  for (size_t i = 0; i < params_.size(); ++i)
    if (spec(i).role == role && spec(i).layer == layer)
      return static_cast<int>(i);
  return -1;
}

size_t ShardTable::param_at(int64_t e) const {
  CHECK(e >= 0 && e < num_elements_);
  const auto it = std::upper_bound(
      params_.begin(), params_.end(), e,
      [](int64_t x, const ShardParam& p) { return x < p.offset; });
  return static_cast<size_t>(it - params_.begin()) - 1;
}

int ShardTable::find_unit(UnitKind kind, int chunk, int64_t layer) const {
  for (size_t u = 0; u < units_.size(); ++u)
    if (units_[u].kind == kind && units_[u].chunk == chunk &&
        units_[u].layer == layer)
      return static_cast<int>(u);
  return -1;
}

std::vector<Piece> ShardTable::pieces(int64_t begin, int64_t end,
                                      bool owned) const {
  CHECK(0 <= begin && begin <= end && end <= num_elements_);
  std::vector<Piece> out;
  for (int64_t at = begin; at < end;) {
    const ShardParam& p = params_[param_at(at)];
    const int64_t from = at - p.offset;
    const int64_t to = std::min(end - p.offset, p.numel());
    const int64_t columns = p.rect.cols;
    const int64_t row = from / columns;
    const int64_t column = from % columns;
    int64_t rows = (to - from) / columns;
    int64_t width = columns;
    int64_t next = from + rows * columns;
    if (column != 0 || rows == 0) {
      next = std::min(to, (row + 1) * columns);
      rows = 1;
      width = next - from;
    }
    if (!owned || p.owner)
      out.push_back(
          {.param = p.param,
           .rect = {p.rect.row + row, p.rect.col + column, rows, width},
           .at = at,
           .row_stride = columns});
    at = p.offset + next;
  }
  return out;
}

void ShardTable::initial_values(uint64_t seed, int64_t begin,
                                std::span<float> out) const {
  for (const Piece& p :
       pieces(begin, begin + static_cast<int64_t>(out.size()))) {
    const ParamSpec& s = (*table_)[p.param];
    const std::span<float> part = out.subspan(
        static_cast<size_t>(p.at - begin), static_cast<size_t>(p.rect.numel()));
    if (s.init != Init::kNormal) {
      std::ranges::fill(part, s.init == Init::kOnes ? 1.0F : 0.0F);
      continue;
    }
    const auto width = static_cast<size_t>(p.rect.cols);
    for (int64_t r = 0; r < p.rect.rows; ++r) {
      const int64_t e = (p.rect.row + r) * s.shape.back() + p.rect.col;
      const std::span<float> row =
          part.subspan(static_cast<size_t>(r) * width, width);
      random_normals(seed, hash64(s.name), static_cast<uint64_t>(e), row);
      for (float& x : row) x = static_cast<float>(s.init_std) * x;
    }
  }
}

Result<StageBounds> stage_bounds(const ModelConfig& config, int stages,
                                 int64_t T) {
  const ModelWork work = work_per_token(config, T);
  return split_layers(config.n_layers, stages,
                      {.head = work.head / (work.block + work.attention)});
}

}  // namespace remesh::geometry
