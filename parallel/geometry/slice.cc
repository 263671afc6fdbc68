#include "parallel/geometry/slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "parallel/geometry/batch.h"
#include "proto/base/text.h"

namespace remesh::geometry {

int64_t Box::numel() const {
  int64_t n = 1;
  for (const int64_t c : count) n *= c;
  return n;
}

Box whole(const ParamSpec& spec) {
  return {std::vector<int64_t>(spec.shape.size(), 0), spec.shape};
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  CHECK(a.start.size() == b.start.size());
  Box out;
  for (size_t d = 0; d < a.start.size(); ++d) {
    const int64_t begin = std::max(a.start[d], b.start[d]);
    const int64_t end =
        std::min(a.start[d] + a.count[d], b.start[d] + b.count[d]);
    if (begin >= end) return std::nullopt;
    out.start.push_back(begin);
    out.count.push_back(end - begin);
  }
  return out;
}

void for_each_run(const Box& outer, const Box& inner,
                  const std::function<void(int64_t, int64_t, int64_t)>& f) {
  const size_t dims = outer.start.size();
  CHECK(inner.start.size() == dims);
  for (size_t d = 0; d < dims; ++d)
    CHECK(inner.start[d] >= outer.start[d] &&
          inner.start[d] + inner.count[d] <= outer.start[d] + outer.count[d]);
  if (inner.empty()) return;
  // Dims from `flat` on are whole in both, so they and the one before them
  // make one run.
  size_t flat = dims;
  while (flat > 0 && inner.count[flat - 1] == outer.count[flat - 1]) --flat;
  if (flat > 0) --flat;
  int64_t run = 1;
  for (size_t d = flat; d < dims; ++d) run *= inner.count[d];
  std::vector<int64_t> at(flat, 0);  // index within inner
  for (int64_t done = 0; done < inner.numel(); done += run) {
    int64_t offset = 0;
    for (size_t d = 0; d < dims; ++d) {
      const int64_t i =
          inner.start[d] - outer.start[d] + (d < flat ? at[d] : 0);
      offset = offset * outer.count[d] + i;
    }
    f(offset, done, run);
    for (size_t d = flat; d-- > 0;) {
      if (++at[d] < inner.count[d]) break;
      at[d] = 0;
    }
  }
}

Status validate_layout(const ModelConfig& config, const Layout& layout) {
  RETURN_IF_ERROR(config.validate());
  const int64_t tp = layout.tp;
  const auto fits = [&](int64_t t) {
    const int64_t kv = config.n_kv_heads;
    return config.n_heads % t == 0 && (kv % t == 0 || t % kv == 0) &&
           t <= config.hidden_dim && t <= config.vocab_size;
  };
  if (!fits(tp)) {
    std::vector<std::string> allowed;
    for (int64_t t = 1; t <= config.n_heads; ++t)
      if (fits(t)) allowed.push_back(std::to_string(t));
    return invalid_argument(fmt::format(
        "tensor-parallel degree {}: must divide the {} query heads, divide "
        "the {} key/value heads or be a multiple of them, and be at most "
        "hidden_dim {} and vocab_size {}; allowed: {}",
        tp, config.n_heads, config.n_kv_heads, config.hidden_dim,
        config.vocab_size, join(allowed)));
  }
  if (layout.pp > config.n_layers)
    return invalid_argument(
        fmt::format("pipeline-parallel degree {}: a stage needs a layer and "
                    "there are {}; allowed: 1 to {}",
                    layout.pp, config.n_layers, config.n_layers));
  return ok_status();
}

bool on_stage(const ParamSpec& spec, bool tied, const StageBounds& bounds,
              int stage) {
  const int last = static_cast<int>(bounds.size()) - 2;
  CHECK(stage >= 0 && stage <= last);
  switch (spec.role) {
    case Role::kEmbedding:
      return stage == 0 || (tied && stage == last);
    case Role::kFinalNorm:
    case Role::kHead:
      return stage == last;
    default: {
      const auto s = static_cast<size_t>(stage);
      return spec.layer >= bounds[s] && spec.layer < bounds[s + 1];
    }
  }
}

Box tp_box(const ParamSpec& spec, int tp, int tp_index) {
  Box box = whole(spec);
  if (spec.split == TensorSplit::kNone) return box;
  const size_t dim = spec.split == TensorSplit::kRows ? 0 : 1;
  CHECK(spec.shape[dim] % spec.split_unit == 0);
  const int64_t num_units = spec.shape[dim] / spec.split_unit;
  const bool heads = spec.role == Role::kKey || spec.role == Role::kValue;
  // Fewer key/value heads than ranks: each rank has the one its queries read.
  MicrobatchRange units = deal(num_units, tp, tp_index);
  if (heads && num_units < tp) {
    units.begin = tp_index * num_units / tp;
    units.end = units.begin + 1;
  }
  box.start[dim] = units.begin * spec.split_unit;
  box.count[dim] = units.size() * spec.split_unit;
  return box;
}

std::vector<FlatRange> split_even(int64_t num_elements, int parts) {
  CHECK(parts >= 1 && num_elements >= 0);
  std::vector<FlatRange> ranges;
  for (int p = 0; p < parts; ++p) {
    const MicrobatchRange r = deal(num_elements, parts, p);
    ranges.push_back({r.begin, r.end});
  }
  return ranges;
}

std::vector<Piece> boxes_of_range(const ParamTable& table, int64_t begin,
                                  int64_t end) {
  CHECK(0 <= begin && begin <= end && end <= table.num_elements());
  std::vector<Piece> pieces;
  for (int64_t at = begin; at < end;) {
    const size_t i = table.param_at(at);
    const int64_t from = at - table.offset(i);
    const int64_t to = std::min(end - table.offset(i), table[i].numel());
    const std::vector<int64_t>& shape = table[i].shape;
    CHECK(shape.size() == 1 || shape.size() == 2);
    int64_t next = to;  // within the parameter
    if (shape.size() == 1) {
      pieces.push_back({i, {{from}, {to - from}}, at});
    } else {
      const int64_t columns = shape[1];
      const int64_t row = from / columns;
      const int64_t column = from % columns;
      const int64_t rows = (to - from) / columns;
      if (column == 0 && rows > 0) {
        next = from + rows * columns;
        pieces.push_back({i, {{row, 0}, {rows, columns}}, at});
      } else {
        next = std::min(to, (row + 1) * columns);
        pieces.push_back({i, {{row, column}, {1, next - from}}, at});
      }
    }
    at = table.offset(i) + next;
  }
  return pieces;
}

}  // namespace remesh::geometry
