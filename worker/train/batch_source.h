// BatchSource: this rank's microbatches of a training or validation step, as
// token arrays read from the data set in the order of the sampler.
//
// Microbatch j of a step has sequences [j * B, (j + 1) * B) of the global
// batch, B = local_batch. geometry/batch.h assigns microbatches to ranks. The
// contents of a step depend only on (seed, step), not on the mesh.
//
// Ownership: owns the data set and the arrays; a returned span is valid until
// the next call. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "parallel/geometry/batch.h"
#include "proto/base/status.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"
#include "worker/model/stage.h"

namespace remesh::train {

struct BatchOptions {
  uint64_t seed = 1;
  int64_t seq_len = 1;
  int64_t global_batch = 1;  // sequences per step
  int64_t local_batch = 1;   // sequences per microbatch; divides global_batch
  int64_t offset = 0;        // data.sequence_offset
  int64_t eval_sequences = 0;
  bool document_mask = true;  // a document's tokens see no other document
  geometry::Shares shares;    // of a step's microbatches
  int dp = 1;
  int dp_index = 0;
};

class BatchSource {
 public:
  // Fails if the data set has no complete sequence or the sizes do not match.
  static Result<BatchSource> make(data::Dataset dataset,
                                  const BatchOptions& options);

  const data::Dataset& dataset() const { return dataset_; }
  // This rank's microbatches of step `step`, counted from 0; possibly none.
  // Fails on damaged data.
  Result<std::span<const model::MicroBatch>> step(int64_t step);
  // The members of the data set that are validated, each by an equal part of
  // eval_sequences or all that it has; none: no validation.
  const std::vector<size_t>& validated() const { return validated_; }
  // This rank's microbatches of the validation of a member, the same each time.
  // The last one of all ranks may be smaller.
  Result<std::span<const model::MicroBatch>> validation(size_t member);

 private:
  BatchSource(data::Dataset dataset, data::Sampler sampler,
              const BatchOptions& options)
      : options_(options),
        dataset_(std::move(dataset)),
        sampler_(std::move(sampler)) {}
  struct Window {
    const data::Split* split = nullptr;
    int64_t number = 0;
  };
  // Reads windows as microbatches of at most local_batch sequences.
  Status read(const std::vector<Window>& windows);

  BatchOptions options_;
  data::Dataset dataset_;
  data::Sampler sampler_;
  std::vector<size_t> validated_;
  std::vector<std::vector<int64_t>> eval_windows_;  // by member
  std::vector<int32_t> tokens_, targets_;
  std::vector<int64_t> document_starts_;
  std::vector<model::MicroBatch> microbatches_;
};

}  // namespace remesh::train
