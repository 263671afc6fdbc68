#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/read_plan.h"

namespace remesh::manifest {
namespace {

using geometry::ParamSpec;
using geometry::ParamTable;

// Index of each parameter by name; views into the table.
using NameIndex = std::unordered_map<std::string_view, size_t>;

NameIndex index_of(const ParamTable& table) {
  NameIndex index;
  for (size_t i = 0; i < table.size(); ++i) index[table[i].name] = i;
  return index;
}

Box whole_box(const ParamSpec& spec) {
  if (spec.shape.size() == 1) return {.rows = 1, .cols = spec.shape[0]};
  return {.rows = spec.shape[0], .cols = spec.shape[1]};
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
    return invalid_argument("no parameter '" + s.param() + "' in this model");
  const std::vector<int64_t>& shape = table[it->second].shape;
  const int dims = static_cast<int>(shape.size());
  bool inside = s.start_size() == dims && s.count_size() == dims;
  for (int d = 0; inside && d < dims; ++d)
    inside = s.start(d) >= 0 && s.count(d) >= 1 && s.count(d) <= shape[d] &&
             s.start(d) <= shape[d] - s.count(d);
  if (!inside)
    return invalid_argument(fmt::format("{}: not inside its shape ({})",
                                        text(s), fmt::join(shape, ", ")));
  return it->second;
}

struct Placed {
  Box box;
  int shard = 0;
  int slice = 0;
};

// Slices of every parameter, in table order. Corrupt when one does not fit.
Result<std::vector<std::vector<Placed>>> place(const pb::Manifest& manifest,
                                               const ParamTable& table) {
  const NameIndex index = index_of(table);
  std::vector<std::vector<Placed>> placed(table.size());
  for (int f = 0; f < manifest.shards_size(); ++f) {
    const pb::ShardFile& shard = manifest.shards(f);
    for (int i = 0; i < shard.slices_size(); ++i) {
      const auto param = find_in_table(shard.slices(i), table, index);
      if (!param.ok())
        return corrupt(shard.name() + ": " + param.status().message());
      placed[*param].push_back(
          {.box = box_of(shard.slices(i)), .shard = f, .slice = i});
    }
  }
  return placed;
}

// Sweeps the rows from the top: between two rows where a box starts or ends,
// the boxes in play must tile the columns.
Status check_tiling(const ParamSpec& spec, std::vector<Placed> boxes,
                    const pb::Manifest& manifest) {
  std::vector<int64_t> rows;
  for (const Placed& p : boxes) {
    rows.push_back(p.box.row);
    rows.push_back(p.box.row + p.box.rows);
  }
  const Box all = whole_box(spec);
  rows.push_back(0);
  rows.push_back(all.rows);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::sort(boxes.begin(), boxes.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.box.row, a.box.col) < std::tie(b.box.row, b.box.col);
  });
  std::vector<Placed> active;
  size_t next = 0;
  for (size_t r = 0; r + 1 < rows.size(); ++r) {
    std::erase_if(active, [&](const Placed& p) {
      return p.box.row + p.box.rows <= rows[r];
    });
    while (next < boxes.size() && boxes[next].box.row == rows[r])
      active.push_back(boxes[next++]);
    std::sort(
        active.begin(), active.end(),
        [](const Placed& a, const Placed& b) { return a.box.col < b.box.col; });
    int64_t col = 0;
    for (const Placed& p : active) {
      if (p.box.col < col)
        return corrupt(fmt::format(
            "{}: row {}, column {} is stored twice, once in {}", spec.name,
            rows[r], p.box.col, manifest.shards(p.shard).name()));
      if (p.box.col > col) break;
      col += p.box.cols;
    }
    if (col != all.cols)
      return corrupt(fmt::format("{}: row {}, column {} is in no shard",
                                 spec.name, rows[r], col));
  }
  return ok_status();
}

}  // namespace

Box box_of(const pb::Slice& s) {
  CHECK(s.start_size() == s.count_size() &&
        (s.start_size() == 1 || s.start_size() == 2));
  if (s.start_size() == 1)
    return {.col = s.start(0), .rows = 1, .cols = s.count(0)};
  return {.row = s.start(0),
          .col = s.start(1),
          .rows = s.count(0),
          .cols = s.count(1)};
}

Box intersect(const Box& a, const Box& b) {
  const int64_t row = std::max(a.row, b.row);
  const int64_t col = std::max(a.col, b.col);
  const int64_t rows = std::min(a.row + a.rows, b.row + b.rows) - row;
  const int64_t cols = std::min(a.col + a.cols, b.col + b.cols) - col;
  if (rows <= 0 || cols <= 0) return {};
  return {.row = row, .col = col, .rows = rows, .cols = cols};
}

Status check_in_table(const pb::Slice& slice, const ParamTable& table) {
  return find_in_table(slice, table, index_of(table)).status();
}

Status check_coverage(const pb::Manifest& manifest, const ParamTable& table) {
  ASSIGN_OR_RETURN(auto placed, place(manifest, table));
  for (size_t i = 0; i < table.size(); ++i)
    RETURN_IF_ERROR(check_tiling(table[i], std::move(placed[i]), manifest));
  return ok_status();
}

pb::Slice make_slice(const ParamSpec& spec, const geometry::Box& box) {
  CHECK(box.start.size() == spec.shape.size() &&
        box.count.size() == spec.shape.size());
  pb::Slice s;
  s.set_param(spec.name);
  s.mutable_start()->Assign(box.start.begin(), box.start.end());
  s.mutable_count()->Assign(box.count.begin(), box.count.end());
  return s;
}

std::vector<pb::Slice> slices_of_range(const ParamTable& table, int64_t begin,
                                       int64_t end) {
  std::vector<pb::Slice> slices;
  for (const geometry::Piece& p : geometry::boxes_of_range(table, begin, end))
    slices.push_back(make_slice(table[p.param], p.box));
  return slices;
}

std::vector<pb::Slice> whole_slices(const ParamTable& table) {
  return slices_of_range(table, 0, table.num_elements());
}

Result<std::vector<Read>> plan_reads(const pb::Manifest& manifest,
                                     const ParamTable& table,
                                     const std::vector<pb::Slice>& wanted) {
  RETURN_IF_ERROR(check_coverage(manifest, table));
  ASSIGN_OR_RETURN(const auto placed, place(manifest, table));
  const NameIndex index = index_of(table);
  std::vector<Read> reads;
  for (size_t w = 0; w < wanted.size(); ++w) {
    ASSIGN_OR_RETURN(const size_t param,
                     find_in_table(wanted[w], table, index));
    const Box target = box_of(wanted[w]);
    int64_t filled = 0;
    for (const Placed& p : placed[param]) {
      const Box meet = intersect(p.box, target);
      if (meet.numel() == 0) continue;
      filled += meet.numel();
      reads.push_back(
          {.shard = p.shard, .slice = p.slice, .wanted = w, .box = meet});
    }
    // The stored boxes are disjoint and cover; anything else is our mistake.
    CHECK(filled == target.numel());
  }
  std::stable_sort(
      reads.begin(), reads.end(), [](const Read& a, const Read& b) {
        return std::tie(a.shard, a.slice) < std::tie(b.shard, b.slice);
      });
  return reads;
}

}  // namespace remesh::manifest
