// The metrics of a step as they leave the rank's host: a StepRecord of the
// board as a message.
#pragma once

#include "proto/control.pb.h"
#include "worker/board/board.h"

namespace remesh::board {

// Omits what was not measured.
pb::StepMetrics to_metrics(const StepRecord& record, int64_t generation,
                           const pb::Mesh& mesh);

}  // namespace remesh::board
