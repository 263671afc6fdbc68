// The weights that a model has now: those of its files or, of a run that trains
// on this host, the newest state in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "checkpoint/memory/segment_directory.h"
#include "parallel/geometry/param_table.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "worker/sample/model_files.h"

namespace remesh::sample {

struct Weights {
  geometry::ModelConfig model;
  // Fills the vector of all parameters, in the order of the table of `model`.
  std::function<Status(const geometry::ParamTable&, std::span<float>)> load;
};

// Fails like WeightSource::open(). `fs` must outlive the weights. `tick`:
// bytes of the weights that load() has read, and in all.
using LoadTick = std::function<void(uint64_t done, uint64_t total)>;
Result<Weights> open_weights(FileSystem& fs, const ModelFiles& files,
                             const LoadTick& tick = {});

// Those of the newest state that the shared memory of this host has whole, of
// the run with number `run_id`. NotFound if it has none of a step above
// `above_step`. The state is read beside the training, which replaces it after
// two steps: load() then takes a newer one, and is Unavailable if each was
// replaced while it was read.
// `shared`: where the workers' folders are.
Result<Weights> weights_in_memory(
    const geometry::ModelConfig& model, uint64_t run_id, int64_t above_step,
    const std::string& shared = memory::kSharedMemory);

}  // namespace remesh::sample
