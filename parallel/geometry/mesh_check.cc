#include "parallel/geometry/mesh_check.h"

#include <fmt/format.h>

#include "parallel/geometry/slice.h"

namespace remesh::geometry {

Status check_context(int64_t T, int cp) {
  const int64_t parts = cp == 1 ? 1 : int64_t{2} * cp;
  if (T % parts == 0) return ok_status();
  return invalid_argument(fmt::format(
      "sequences of {} tokens over {} context-parallel ranks, two equal parts "
      "each; allowed: a multiple of {}",
      T, cp, parts));
}

Status check_mesh(const ModelConfig& model, int64_t T, int64_t microbatches,
                  int chunks, const Layout& layout) {
  RETURN_IF_ERROR(validate_layout(model, layout));
  if (layout.dp > microbatches)
    return invalid_argument(fmt::format(
        "a data-parallel rank needs a microbatch and a step has {}; dp must be "
        "1 to {}",
        microbatches, microbatches));
  RETURN_IF_ERROR(check_context(T, layout.cp));
  const int64_t stages = int64_t{1} * layout.pp * chunks;
  if (stages > model.n_layers)
    return invalid_argument(fmt::format(
        "pp = {} with {} model chunks a rank: has {} stages; must be at most "
        "the {} layers",
        layout.pp, chunks, stages, model.n_layers));
  return ok_status();
}

}  // namespace remesh::geometry
