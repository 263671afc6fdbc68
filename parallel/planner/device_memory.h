// Memory that a training step takes on a device, for programs that keep 16-bit
// weights and fp32 optimizer state (Rajbhandari et al. 2020; Korthikanti et al.
// 2022). The engine's own, which keeps fp32 weights, is in memory.h. Pure.
#pragma once

#include "parallel/planner/layer_cost.h"

namespace remesh::planner {

struct DeviceMemory {
  double weights = 0, gradients = 0, optimizer = 0;  // bytes
  double activations = 0;  // of all microbatches that a rank holds at once
  double total() const { return weights + gradients + optimizer + activations; }
};

// Of the first pipeline rank. REQUIRES: as predict_step().
DeviceMemory device_memory(const JobShape& shape,
                           const geometry::Layout& layout,
                           const Execution& run);

}  // namespace remesh::planner
