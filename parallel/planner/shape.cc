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

geometry::ScheduleKind schedule_kind_on(const JobShape& shape,
                                        const geometry::Layout& layout) {
  using geometry::ScheduleKind;
  const bool plain =
      layout.pp == 1 ||
      (shape.chunks == 1 && shape.schedule == ScheduleKind::kInterleaved1F1B);
  return plain ? ScheduleKind::k1F1B : shape.schedule;
}

geometry::Schedule schedule_on(const JobShape& shape,
                               const geometry::Layout& layout) {
  const int chunks = chunks_on(shape, layout);
  int64_t n = most_microbatches(shape, layout);
  if (chunks > 1) n = (n + layout.pp - 1) / layout.pp * layout.pp;
  auto schedule = geometry::make_schedule(
      schedule_kind_on(shape, layout), layout.pp, static_cast<int>(n), chunks);
  CHECK(schedule.ok());
  return *std::move(schedule);
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
  return ok_status();
}

}  // namespace remesh::planner
