#include "parallel/planner/shape.h"

#include <fmt/format.h>

#include "parallel/geometry/slice.h"

namespace remesh::planner {

int chunks_on(const JobShape& shape, const geometry::Layout& layout) {
  return layout.pp == 1 ? 1 : shape.chunks;
}

int shard_group_on(const JobShape& shape, const geometry::Layout& layout) {
  const int n = layout.dp * layout.cp;
  if (shape.zero_stage == 0) return 1;
  if (shape.shard_group == 0) return n;
  int z = std::min(shape.shard_group, n);
  while (n % z != 0) --z;
  return z;
}

Result<geometry::Schedule> schedule_on(const JobShape& shape,
                                       const geometry::Layout& layout,
                                       int64_t microbatches) {
  using geometry::ScheduleKind;
  const int chunks = chunks_on(shape, layout);
  const bool plain =
      chunks == 1 && shape.schedule == ScheduleKind::kInterleaved1F1B;
  return geometry::make_schedule(plain ? ScheduleKind::k1F1B : shape.schedule,
                                 layout.pp, static_cast<int>(microbatches),
                                 chunks);
}

int64_t most_microbatches(const JobShape& shape,
                          const geometry::Layout& layout) {
  return (shape.microbatches + layout.dp - 1) / layout.dp;
}

Status admit(const JobShape& shape, const geometry::Layout& layout) {
  RETURN_IF_ERROR(geometry::validate_layout(shape.model, layout));
  const auto refuse = [&](const std::string& why) {
    return invalid_argument(layout.to_string() + ": " + why);
  };
  if (layout.dp > shape.microbatches)
    return refuse(fmt::format(
        "a data-parallel rank needs a microbatch and a step has {}; dp must be "
        "1 to {}",
        shape.microbatches, shape.microbatches));
  if (layout.cp > 1 && shape.T % (int64_t{2} * layout.cp) != 0)
    return refuse(fmt::format(
        "twice the context-parallel degree must divide the {} tokens of a "
        "sequence",
        shape.T));
  const int64_t stages = int64_t{1} * layout.pp * chunks_on(shape, layout);
  if (stages > shape.model.n_layers)
    return refuse(fmt::format(
        "{} pipeline ranks with {} chunks each; together must be at most the "
        "{} layers",
        layout.pp, chunks_on(shape, layout), shape.model.n_layers));
  if (chunks_on(shape, layout) > 1 &&
      (shape.microbatches % layout.dp != 0 ||
       shape.microbatches / layout.dp % layout.pp != 0))
    return refuse(fmt::format(
        "interleaved order needs a multiple of {} microbatches on each "
        "data-parallel rank; there are {} over {}",
        layout.pp, shape.microbatches, layout.dp));
  return ok_status();
}

}  // namespace remesh::planner
