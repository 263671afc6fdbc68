// Runs an Engine on every rank of a mesh, as threads over local_comm, and joins
// the parts that they hold into complete vectors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/engine/engine.h"

namespace remesh::engine {

// Of the targets.
enum class Masked { kNone, kSome, kAllButTheFirstSequence, kAll };

struct Case {
  geometry::ModelConfig model;
  geometry::Layout layout;
  EngineOptions options;  // num_microbatches, max_batch, max_seq are B, T below
  int64_t sequences = 4;  // of the global batch; the last microbatch may be
                          // smaller than max_batch
  int steps = 3;
  double lr = 1e-3;
  uint64_t seed = 1;  // of weights and data
  Masked masked = Masked::kNone;
  int skipped_step = 0;  // from 1: makes no update
  // The state lives in a store of two buffers, the one not in use full of NaN.
  bool out_of_place = false;
  std::string to_string() const;
};

struct Outcome {
  Status status;  // the first that failed
  std::vector<double> loss, norm;
  double evaluated = 0;           // mean loss of the batch after all steps
  std::vector<float> first_grad;  // by the ParamTable, of the first step
  std::vector<float> weights;     // ... after all
  std::string inconsistent;       // ranks that hold the same differ
};

Outcome run_case(const Case& c);
// One rank's part of it, on any world that fits the layout. Losses and norms
// are known on rank 0; vectors are not joined.
Outcome run_rank(const Case& c, comm::Comm& world);

// Largest relative L2 difference of any parameter, with its name.
struct Difference {
  double value = 0;
  std::string param;
};
Difference largest_difference(const geometry::ModelConfig& model,
                              const std::vector<float>& got,
                              const std::vector<float>& want);

// Random cases: the model and batch, and meshes of it up to `ranks`. Only ones
// that are admitted.
Case random_case(uint64_t seed, int ranks);
// The same model and batch on one rank.
Case reference_of(const Case& c);

}  // namespace remesh::engine
