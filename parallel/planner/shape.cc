#include "parallel/planner/shape.h"

#include <algorithm>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/mesh_check.h"

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
  const bool plain =
      layout.pp == 1 ||
      (shape.chunks == 1 && geometry::traits_of(shape.schedule).interleaved);
  return plain ? geometry::ScheduleKind::k1F1B : shape.schedule;
}

geometry::Schedule schedule_on(const JobShape& shape,
                               const geometry::Layout& layout,
                               int64_t microbatches) {
  auto schedule =
      geometry::step_schedule(schedule_kind_on(shape, layout), layout.pp,
                              chunks_on(shape, layout), microbatches);
  CHECK(schedule.ok());
  return *std::move(schedule);
}

int64_t most_microbatches(const JobShape& shape,
                          const geometry::Layout& layout) {
  const bool shared = static_cast<int>(shape.shares.size()) == layout.dp;
  return geometry::largest_share(shape.microbatches,
                                 shared ? shape.shares : geometry::Shares{},
                                 layout.dp);
}

Status admit(const JobShape& shape, const geometry::Layout& layout) {
  const Status s =
      geometry::check_mesh(shape.model, shape.T, shape.microbatches,
                           chunks_on(shape, layout), layout);
  return s.ok() ? s : s.with_context(layout.to_string());
}

}  // namespace remesh::planner
