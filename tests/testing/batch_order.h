// The sequences on which a job trains and validates, as batch_order.py lists
// them from the documentation alone, and what the initial weights lose on them.
// With a learning rate of 0 that is the loss of every step, and shows which
// sequences the step was made of.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "parallel/jobfile/jobfile.h"
#include "tests/testing/engine.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/process.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh {

using Sequence = std::vector<int32_t>;  // one token more than train.seq_len

struct BatchOrder {
  std::string sets;  // DIR[=WEIGHT],...
  uint64_t seed = 1;
  int64_t seq_len = 1;
  int64_t global_batch = 1;
  int64_t steps = 1;
  int64_t eval_sequences = 0;
};

// Those of each step, then those of a validation of each data set.
inline std::vector<Sequence> documented_sequences(const BatchOrder& o) {
  const testing::Finished f = testing::run_program(
      {"python3", "tests/testing/batch_order.py", o.sets,
       std::to_string(o.seed), std::to_string(o.seq_len),
       std::to_string(o.global_batch), std::to_string(o.steps),
       std::to_string(o.eval_sequences)});
  EXPECT_EQ(f.exit.code, 0) << f.output;
  std::vector<Sequence> out;
  std::istringstream in(f.output);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    out.emplace_back();
    for (int32_t token = 0; words >> token;) out.back().push_back(token);
  }
  return out;
}

// Positions of a microbatch at which documents begin, by the token that ends a
// text.
inline std::vector<int64_t> document_starts(
    const model::MicroBatch& m, int32_t end = tokenizer::kByteEndOfText) {
  std::vector<int64_t> out;
  for (int64_t b = 0; b < m.B; ++b)
    for (int64_t t = 1; t < m.T; ++t)
      if (m.tokens_BT[b * m.T + t - 1] == end) out.push_back(b * m.T + t);
  return out;
}

// For a resolved job whose data are bytes.
class InitialLoss {
 public:
  explicit InitialLoss(const pb::Job& job)
      : seq_len_(job.train().seq_len()),
        table_(geometry::ParamTable::make(jobfile::model_config(job))),
        engine_(engine::make_ready_engine(table_, *mesh_,
                                          {.max_batch = 1, .max_seq = seq_len_},
                                          *backend_, job.train().seed())
                    .value()) {}

  // The mean over all targets of the sequences.
  double of(std::span<const Sequence> sequences) {
    double sum = 0;
    for (const Sequence& q : sequences) sum += sum_of(q);
    return sum / static_cast<double>(sequences.size()) /
           static_cast<double>(seq_len_);
  }

 private:
  double sum_of(const Sequence& q) {
    const auto [known, is_new] = sums_.emplace(q, 0);
    if (is_new) {
      model::MicroBatch one{q.data(), q.data() + 1, 1, seq_len_};
      const auto starts = document_starts(one);
      one.document_starts = starts;
      known->second = engine_->evaluate({&one, 1}).value().loss_sum;
    }
    return known->second;
  }

  const int64_t seq_len_;
  const geometry::ParamTable table_;
  const std::unique_ptr<kernels::Backend> backend_ =
      kernels::make_reference_backend();
  const std::vector<std::unique_ptr<comm::Comm>> world_ =
      comm::make_local_comms(1);
  const std::unique_ptr<comm::Mesh> mesh_ =
      comm::Mesh::make(*world_[0], {}).value();
  const std::unique_ptr<engine::Engine> engine_;
  std::map<Sequence, double> sums_;
};

}  // namespace remesh
