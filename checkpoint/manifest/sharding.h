// Sharding (parallel/geometry/sharding.h) and state records as messages.
#pragma once

#include "parallel/geometry/sharding.h"
#include "proto/base/status.h"
#include "proto/manifest.pb.h"

namespace remesh::manifest {

pb::Sharding sharding_info(const geometry::Sharding& sharding);
// Corrupt, naming the field, when a degree, the number of bounds or the stage
// is none that sharding_info() gives. Whether a model admits it, bounds
// included, is make_rank_shard()'s question.
Result<geometry::Sharding> parse_sharding(const pb::Sharding& info);

}  // namespace remesh::manifest
