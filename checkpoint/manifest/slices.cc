#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/read_plan.h"

namespace remesh::manifest {
namespace {

using geometry::ParamSpec;
using geometry::ParamTable;
using geometry::Piece;
using geometry::Rect;
using geometry::Uncovered;

// Index of each parameter by name; views into the table.
using NameIndex = std::unordered_map<std::string_view, size_t>;

NameIndex index_of(const ParamTable& table) {
  NameIndex index;
  for (size_t i = 0; i < table.size(); ++i) index[table[i].name] = i;
  return index;
}

std::string text(const pb::Slice& s) {
  std::string at;
  for (int d = 0; d < s.start_size() && d < s.count_size(); ++d)
    at += fmt::format("{}{}+{}", d == 0 ? "" : ", ", s.start(d), s.count(d));
  return fmt::format("{}[{}]", s.param(), at);
}

Result<size_t> find_in_table(const pb::Slice& s, const ParamTable& table,
                             const NameIndex& index) {
  const auto it = index.find(s.param());
  if (it == index.end())
    return corrupt("no parameter '" + s.param() + "' in this model");
  const std::vector<int64_t>& shape = table[it->second].shape;
  const int dims = static_cast<int>(shape.size());
  bool inside = s.start_size() == dims && s.count_size() == dims;
  for (int d = 0; inside && d < dims; ++d)
    inside = s.start(d) >= 0 && s.count(d) >= 1 && s.count(d) <= shape[d] &&
             s.start(d) <= shape[d] - s.count(d);
  if (!inside)
    return corrupt(fmt::format("{}: not inside its shape ({})", text(s),
                               fmt::join(shape, ", ")));
  return it->second;
}

// Holder i is the i'th slice of the manifest, shard after shard, as a vector of
// its own.
struct StoredSlices {
  geometry::HeldPieces pieces;
  std::vector<Read> slices;  // their places in the manifest
};

Status check_exactly_once(const ParamSpec& spec, size_t param,
                          const StoredSlices& stored,
                          const pb::Manifest& manifest) {
  Uncovered missing(full_rect(spec));
  for (const auto& [piece, slice] : stored.pieces.of(param)) {
    Uncovered twice(piece.rect);
    missing.cover(piece.rect, [&](const Rect& part) {
      twice.cover(part, [](const Rect&) {});
    });
    if (!twice.empty())
      return corrupt(fmt::format(
          "{}: row {}, column {} is stored twice, once in {}", spec.name,
          twice.first().row, twice.first().col,
          manifest.shards(stored.slices[static_cast<size_t>(slice)].shard)
              .name()));
  }
  if (missing.empty()) return ok_status();
  return corrupt(fmt::format("{}: row {}, column {} is in no shard", spec.name,
                             missing.first().row, missing.first().col));
}

// The slices of every parameter. Corrupt unless they cover the table exactly
// once.
Result<StoredSlices> index_slices(const pb::Manifest& manifest,
                                  const ParamTable& table) {
  const NameIndex index = index_of(table);
  StoredSlices stored{.pieces = geometry::HeldPieces(table.size())};
  for (int f = 0; f < manifest.shards_size(); ++f) {
    const pb::ShardFile& shard = manifest.shards(f);
    for (int i = 0; i < shard.slices_size(); ++i) {
      ASSIGN_OR_RETURN(const size_t param,
                       find_in_table(shard.slices(i), table, index)
                           .with_context(shard.name()));
      const Rect rect = rect_of(shard.slices(i));
      stored.pieces.add({.param = param, .rect = rect, .row_stride = rect.cols},
                        static_cast<int>(stored.slices.size()));
      stored.slices.push_back({.shard = f, .slice = i});
    }
  }
  for (size_t i = 0; i < table.size(); ++i)
    RETURN_IF_ERROR(check_exactly_once(table[i], i, stored, manifest));
  return stored;
}

}  // namespace

Rect rect_of(const pb::Slice& s) {
  CHECK(s.start_size() == s.count_size() &&
        (s.start_size() == 1 || s.start_size() == 2));
  if (s.start_size() == 1)
    return {.col = s.start(0), .rows = 1, .cols = s.count(0)};
  return {.row = s.start(0),
          .col = s.start(1),
          .rows = s.count(0),
          .cols = s.count(1)};
}

Status check_piece(const Piece& piece, const ParamTable& table) {
  if (piece.param >= table.size())
    return invalid_argument(
        fmt::format("no parameter {} in this model", piece.param));
  const ParamSpec& spec = table[piece.param];
  const Rect& r = piece.rect;
  if (!r.empty() && intersect(r, full_rect(spec)) == r) return ok_status();
  return invalid_argument(fmt::format(
      "{}: rows {}+{}, columns {}+{} are not inside its shape ({})", spec.name,
      r.row, r.rows, r.col, r.cols, fmt::join(spec.shape, ", ")));
}

Status check_coverage(const pb::Manifest& manifest, const ParamTable& table) {
  return index_slices(manifest, table).status();
}

pb::Slice make_slice(const ParamSpec& spec, const Rect& rect) {
  pb::Slice s;
  s.set_param(spec.name);
  if (spec.shape.size() == 2) {
    s.add_start(rect.row);
    s.add_count(rect.rows);
  }
  s.add_start(rect.col);
  s.add_count(rect.cols);
  return s;
}

Result<std::vector<Read>> plan_reads(const pb::Manifest& manifest,
                                     const ParamTable& table,
                                     std::span<const Piece> wanted) {
  ASSIGN_OR_RETURN(const StoredSlices stored, index_slices(manifest, table));
  std::vector<Read> reads;
  for (const Piece& piece : wanted) {
    RETURN_IF_ERROR(check_piece(piece, table));
    Uncovered left(piece.rect);
    stored.pieces.fill(
        piece, 0, left, [](int slice) { return std::optional(slice); },
        [&](const geometry::Copy& copy) {
          reads.push_back(stored.slices[static_cast<size_t>(copy.source)]);
          reads.back().copy = copy;
        });
    CHECK(left.empty());  // the slices cover the table
  }
  std::stable_sort(reads.begin(), reads.end(),
                   [](const Read& a, const Read& b) {
                     return a.copy.source < b.copy.source;
                   });
  return reads;
}

}  // namespace remesh::manifest
