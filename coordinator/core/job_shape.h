// The planner's view of a job, and meshes as messages. Pure.
#pragma once

#include <optional>

#include "parallel/geometry/layout.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/shape.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Nothing when the job's model is not a model: of a resolved job it is one.
std::optional<planner::JobShape> shape_of(const pb::Job& job);

geometry::Layout layout_of(const pb::Mesh& mesh);
pb::Mesh mesh_of(const geometry::Layout& layout);

// What the keys of [parallel] amount to on that mesh, for the trainers:
// zero_shard_group divides the data group; there are chunks only in a pipeline,
// and without any it is 1F1B.
pb::Job job_on(const pb::Job& job, const planner::JobShape& shape,
               const geometry::Layout& layout);

// Share of the time that the pipeline's ranks stand by the schedule, each pass
// taking the same time; 0 without a pipeline. REQUIRES: admit() passed.
double scheduled_bubble(const planner::JobShape& shape,
                        const geometry::Layout& layout);

void to_message(const planner::Memory& memory, pb::MemoryUse* out);

}  // namespace remesh::core
