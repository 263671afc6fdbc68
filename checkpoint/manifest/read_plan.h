// Resharding from files (geometry/reshard.h): which part of which stored slice
// fills which part of what is wanted. A checkpoint of any mesh loads under any
// other. Pure.
#pragma once

#include <span>
#include <vector>

#include "checkpoint/manifest/manifest.h"
#include "parallel/geometry/reshard.h"

namespace remesh::manifest {

// REQUIRES: a slice that make_slice() made or decode() accepted.
geometry::Rect rect_of(const pb::Slice& slice);
// InvalidArgument unless the table has the parameter and the piece lies inside
// it.
Status check_piece(const geometry::Piece& piece,
                   const geometry::ParamTable& table);

struct Read {
  int shard = 0;  // index into manifest.shards
  int slice = 0;  // index into that shard's slices
  // From the slice, row by row, to the vector of the wanted pieces.
  geometry::Copy copy;
};

// Reads in order of shard, then slice. Corrupt, naming the parameter, when the
// checkpoint does not cover the table exactly once; InvalidArgument when a
// wanted piece is not in the table.
Result<std::vector<Read>> plan_reads(const pb::Manifest& manifest,
                                     const geometry::ParamTable& table,
                                     std::span<const geometry::Piece> wanted);

}  // namespace remesh::manifest
