// The peak memory of a job's ranks on one host while they train, save, restore
// and change the mesh, with the product's own processes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bench/memory/peak_memory.h"
#include "bench/options.h"
#include "proto/base/status.h"

namespace remesh::bench {

enum class Phase { kTraining, kSave, kRestore, kChange };

struct ChangeRow {
  std::string name;
  Phase phase = Phase::kTraining;
  // Of all ranks of the mesh in training, by the planner.
  uint64_t training = 0;
  // What is needed besides at most, also by the planner: in and after a mesh
  // change the segments of the old mesh, of a save a copy of the state and the
  // buffers of the files.
  uint64_t besides = 0;
  HostPeak peak;  // without what a rank needs whatever the model
};

struct ChangeOptions {
  ModelOptions model;  // size "": 0.1 M parameters
  bool keep_state = true;
  // Private bytes of a rank whatever the model.
  uint64_t base = 0;
  bool only_training = false;
};

// Runs one job with two workers of one slot each, and reports each row as soon
// as it is measured.
Status measure_changes(const ChangeOptions& options,
                       const std::function<void(const ChangeRow&)>& report);

// The private bytes of a rank whatever the model: what a rank of a job with 0.1
// M parameters needs more than the planner predicts.
Result<uint64_t> measure_base(ChangeOptions options);

}  // namespace remesh::bench
