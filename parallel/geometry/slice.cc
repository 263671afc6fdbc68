#include "parallel/geometry/slice.h"

#include <fmt/format.h>

#include <string>

#include "parallel/geometry/batch.h"
#include "proto/base/text.h"

namespace remesh::geometry {

Rect full_rect(const ParamSpec& spec) {
  if (spec.shape.size() == 1) return {.rows = 1, .cols = spec.shape[0]};
  CHECK(spec.shape.size() == 2);
  return {.rows = spec.shape[0], .cols = spec.shape[1]};
}

std::vector<Piece> whole_pieces(const ParamTable& table) {
  std::vector<Piece> out;
  for (size_t i = 0; i < table.size(); ++i) {
    const Rect rect = full_rect(table[i]);
    out.push_back({.param = i,
                   .rect = rect,
                   .at = table.offset(i),
                   .row_stride = rect.cols});
  }
  return out;
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

Rect tp_rect(const ParamSpec& spec, int tp, int tp_index) {
  Rect rect = full_rect(spec);
  if (spec.split == TensorSplit::kNone) return rect;
  // A parameter of one dim is a single row.
  const bool flat = spec.shape.size() == 1;
  CHECK(!flat || spec.split == TensorSplit::kRows);
  const bool by_rows = spec.split == TensorSplit::kRows && !flat;
  const int64_t extent = by_rows ? rect.rows : rect.cols;
  CHECK(extent % spec.split_unit == 0);
  const int64_t num_units = extent / spec.split_unit;
  const bool heads = has_kv_heads(spec.role);
  // Fewer key/value heads than ranks: each rank has the one its queries read.
  MicrobatchRange units = even_share(num_units, tp, tp_index);
  if (heads && num_units < tp) {
    units.begin = tp_index * num_units / tp;
    units.end = units.begin + 1;
  }
  (by_rows ? rect.row : rect.col) = units.begin * spec.split_unit;
  (by_rows ? rect.rows : rect.cols) = units.size() * spec.split_unit;
  return rect;
}

}  // namespace remesh::geometry
