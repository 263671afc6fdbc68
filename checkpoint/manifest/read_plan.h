// Resharding at rest, as data: which part of which stored slice fills which
// part of what is wanted. Pure.
//
// Invariant of a plan: every element of every wanted slice is filled by exactly
// one read. It holds for any slicing, so a checkpoint of any mesh loads under
// any other (the idea of PyTorch's distributed checkpoint planner).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpoint/manifest/manifest.h"

namespace remesh::manifest {

// A rectangle of a parameter as rows and columns, whatever its dims: one of one
// dim is a single row. (geometry::Box keeps the dims.)
struct Box {
  int64_t row = 0, col = 0;    // first
  int64_t rows = 0, cols = 0;  // extent, at least 1 each
  int64_t numel() const { return rows * cols; }
  friend bool operator==(const Box&, const Box&) = default;
};

// REQUIRES: check_in_table(slice, table).ok(), or a slice that decode() took.
Box box_of(const pb::Slice& slice);
// Empty (numel() == 0) when they do not meet.
Box intersect(const Box& a, const Box& b);
// Ok when the table has the parameter and the slice lies inside it.
Status check_in_table(const pb::Slice& slice,
                      const geometry::ParamTable& table);

struct Read {
  int shard = 0;      // index into manifest.shards
  int slice = 0;      // index into that shard's slices
  size_t wanted = 0;  // index into the wanted slices
  Box box;            // in coordinates of the whole parameter
};

// Reads in order of shard, then slice. Corrupt, naming the parameter, when the
// checkpoint does not cover the table exactly once; InvalidArgument when a
// wanted slice is not in the table.
Result<std::vector<Read>> plan_reads(const pb::Manifest& manifest,
                                     const geometry::ParamTable& table,
                                     const std::vector<pb::Slice>& wanted);

}  // namespace remesh::manifest
