// The planner's view of a job, and layouts as messages. Pure.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/manifest/conversions.h"
#include "parallel/geometry/layout.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/placement.h"
#include "parallel/planner/shape.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Nothing if the job's model is invalid; that of a resolved job is valid.
std::optional<planner::JobShape> shape_of(const pb::Job& job);

// What a job asks of a mesh; the caller adds the workers. `shape` is
// shape_of(job), which takes time to compute.
planner::PlacementRequest placement_request(
    const pb::Job& job, const std::optional<planner::JobShape>& shape);

// A core of a host from Report.hardware; nothing if that is no description.
std::optional<planner::Machine> core_from(const std::string& hardware);

using manifest::layout_of;
using manifest::mesh_of;

// The job with the keys of [parallel] resolved for that layout, for the
// trainers: zero_shard_group divides the data-parallel group, and pipeline
// chunks and schedule are those that the layout can run.
pb::Job job_on(const pb::Job& job, const planner::JobShape& shape,
               const geometry::Layout& layout);

// Share of the time that the pipeline's ranks idle by the schedule if all
// passes take the same time; 0 without a pipeline. REQUIRES: admit() passed.
double scheduled_bubble(const planner::JobShape& shape,
                        const geometry::Layout& layout);

}  // namespace remesh::core
