// Layouts, Sharding (parallel/geometry/sharding.h) and state records
// (checkpoint/memory/state_info.h) as messages.
#pragma once

#include <string>

#include "checkpoint/memory/state_info.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/manifest.pb.h"

namespace remesh::manifest {

geometry::Layout layout_of(const pb::Mesh& mesh);
pb::Mesh mesh_of(const geometry::Layout& layout);

pb::Sharding sharding_info(const geometry::Sharding& sharding);
// Corrupt, naming the field, when a degree, the number of bounds or the stage
// is none that sharding_info() gives. Whether a model admits it, bounds
// included, is make_rank_shard()'s question.
Result<geometry::Sharding> parse_sharding(const pb::Sharding& info);

// Of the state with that record, in that file; without its worker and host.
pb::StateHolding holding_of(const memory::StateInfo& info,
                            const std::string& segment);

}  // namespace remesh::manifest
