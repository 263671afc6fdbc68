// Generator: text from a model, token by token. It holds the whole model, and
// the keys and values of the tokens so far.
//
// Not thread-safe; its backend may use many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/geometry/shard_table.h"
#include "proto/base/status.h"
#include "worker/kernels/backend.h"
#include "worker/model/pool.h"
#include "worker/model/stage.h"
#include "worker/sample/weights.h"

namespace remesh::sample {

// Corrupt unless all are finite, as of logits of intact weights.
Status check_finite(std::span<const float> values);

class Generator {
 public:
  // Tokens that are computed at once: of a prompt, or in loss().
  static constexpr int64_t kWindow = 64;

  // Reads the weights. `context`: the most tokens there will be. Fails like
  // Weights::load() and Stage::create(). `backend` must outlive it.
  static Result<std::unique_ptr<Generator>> load(const Weights& weights,
                                                 kernels::Dtype dtype,
                                                 int64_t context,
                                                 kernels::Backend& backend,
                                                 int64_t window = kWindow);

  // Appends the tokens; the logits of what follows them are valid until the
  // next call. REQUIRES: the tokens are of the vocabulary and fit the context.
  std::span<const float> extend(std::span<const int32_t> tokens);

  // Forgets the tokens from there on. REQUIRES: 0 <= length <= length().
  void truncate(int64_t length) { stage_->truncate(length); }
  int64_t length() const { return stage_->length(); }
  int64_t context() const { return context_; }

  // -log of the probability of all tokens but the first, in nats; apart from
  // what extend() has. REQUIRES: 2 to window() + 1 tokens of the vocabulary.
  double loss(std::span<const int32_t> tokens);
  int64_t window() const { return window_; }

  int64_t vocab_size() const { return table_.config().vocab_size; }

 private:
  class Hooks;
  Generator() = default;

  geometry::ParamTable table_;
  std::unique_ptr<geometry::ShardTable> shard_;
  std::unique_ptr<model::Pool> pool_;
  std::span<float> weights_;
  std::unique_ptr<model::Stage> stage_;
  std::vector<float> logits_;
  int64_t context_ = 0, window_ = 0;
};

}  // namespace remesh::sample
