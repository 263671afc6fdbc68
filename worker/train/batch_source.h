// BatchSource: this rank's microbatches of a training or validation step, as
// token arrays read from the data set in the order of the sampler.
//
// Microbatch j of a step has sequences [j * B, (j + 1) * B) of the global
// batch, B = local_batch. geometry/batch.h assigns microbatches to ranks. The
// contents of a step depend only on (seed, step), not on the mesh.
//
// While a step is trained on, a thread reads the next one, so that a page that
// is not in memory holds up no step.
//
// Ownership: owns the data set and the arrays; a returned span is valid until
// the next call. Threads: one, and its own, for which the destructor waits
// until it has read the sequence at hand.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <stop_token>
#include <utility>
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
  // For tests: called before a sequence is read, in either thread.
  std::function<void()> before_sequence;
};

class BatchSource {
 public:
  // Fails if the data set has no complete sequence or the sizes do not match.
  static Result<BatchSource> make(data::Dataset dataset,
                                  const BatchOptions& options);
  BatchSource(BatchSource&&) = default;
  BatchSource& operator=(BatchSource&&) = default;
  ~BatchSource() { stop_.request_stop(); }

  const data::Dataset& dataset() const { return shared_->dataset; }
  // This rank's microbatches of step `step`, counted from 0; possibly none.
  // Fails on damaged data.
  Result<std::span<const model::MicroBatch>> step(int64_t step);
  // The members of the data set that are validated, each by an equal part of
  // eval_sequences or all that it has; none: no validation.
  const std::vector<size_t>& validated() const { return validated_; }
  // The validation of a member is read in so many rounds, on every rank alike,
  // to hold few sequences at a time.
  int64_t validation_rounds(size_t member) const;
  // This rank's microbatches of a round, the same each time; possibly none. The
  // last one of all ranks may be smaller.
  Result<std::span<const model::MicroBatch>> validation(size_t member,
                                                        int64_t round);

 private:
  // What both threads read.
  struct Shared {
    BatchOptions options;
    data::Dataset dataset;
    data::Sampler sampler;
    std::vector<std::vector<int64_t>> eval_windows;  // by member
  };
  struct Batch {
    int64_t step = -1;
    Status status;
    std::vector<int32_t> tokens, targets;
    std::vector<int64_t> document_starts;
    std::vector<model::MicroBatch> microbatches;
  };
  struct Window {
    const data::Split* split = nullptr;
    int64_t number = 0;
  };
  explicit BatchSource(std::unique_ptr<const Shared> shared)
      : shared_(std::move(shared)) {}
  static void read_step(const Shared& shared, int64_t step,
                        const std::stop_token& stop, Batch* out);
  // Reads windows as microbatches of at most local_batch sequences.
  static Status read(const BatchOptions& options,
                     const std::vector<Window>& windows,
                     const std::stop_token& stop, Batch* out);

  std::unique_ptr<const Shared> shared_;
  std::vector<size_t> validated_;
  std::unique_ptr<Batch> batch_ = std::make_unique<Batch>();
  std::unique_ptr<Batch> next_ = std::make_unique<Batch>();
  std::stop_source stop_;      // of reading_
  std::future<void> reading_;  // into next_; destroyed first, at its end
};

}  // namespace remesh::train
