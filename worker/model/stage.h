// Stage: one model chunk on one rank of a mesh: forward and backward of its
// layers under tensor, sequence and context parallelism. A folder per family.
//
// A stage owns activations and compute copies of its weights; master weights
// and gradients belong to the caller, laid out by the ShardTable
// (parallel/geometry) of this rank. All arithmetic goes through a
// kernels::Backend, so nothing here depends on the device.
//
// Several microbatches may be in flight between forward and backward (pipeline
// schedules); each uses one of `num_slots` activation slots. A rank with v
// chunks has v stages.
//
// Tensor parallelism is Megatron's (Shoeybi et al. 2019) with sequence
// parallelism (Korthikanti et al. 2022): norms and the residual stream exist
// on 1/tp of the rows (tokens) a rank; rows are gathered before the
// column-parallel GEMMs and reduce-scattered after the row-parallel ones.
// The vocabulary of embedding and head is split; logits are never gathered.
// Context parallelism: each rank has T / cp tokens of every sequence, two
// pieces that balance the causal mask (context_positions()); keys and values
// circulate in a ring (Liu et al. 2023).
//
// Rows: a microbatch of B sequences has N = B * T / cp rows on this rank, in
// the order b * (T / cp) + t. The residual stream of tensor-parallel rank i is
// rows [i * n, (i + 1) * n) of these, n = stream_rows(B) = ceil(N / tp); rows
// from N on are zero.
//
// Not thread-safe: one Stage belongs to one thread (its kernels may use many).
// With tp or cp above 1 the calls are collective over those groups, whose ranks
// have the same options.
// Deterministic: the same inputs and thread count give the same bits.
// Recomputation, slots, split backward, and the split into stages and chunks
// change no bit, with one exception: a tied embedding on two stages has a
// gradient on each, and their sum is rounded differently.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/geometry/family.h"
#include "parallel/geometry/shard_table.h"
#include "proto/base/status.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/dtype.h"

namespace remesh::comm {
class Comm;
}

namespace remesh::model {

using Dtype = kernels::Dtype;
using geometry::Recompute;

// The frozen weights that low-rank adapters belong to, those of the same rank
// and chunks. The stage computes with them where they are and changes them.
struct BaseWeights {
  const geometry::ShardTable* shard = nullptr;
  std::span<float> values;
};

struct StageOptions {
  int chunk = 0;                     // of the shard table
  Dtype dtype = Dtype::kFp32;        // of the operands of GEMMs
  std::vector<Recompute> recompute;  // by layer of the chunk; empty: kNone
  int64_t max_batch = 1;             // sequences per microbatch, B
  int64_t max_seq = 1;  // tokens per sequence, T, before context parallelism
  int num_slots = 1;    // microbatches in flight
  // backward() computes input gradients, backward_weight() the rest later
  // (ZB-H1, Qi et al. 2023). Otherwise backward() does both.
  bool split_backward = false;
  // 0: the compute copies of all units stay. k >= 2: the blocks share k sets
  // of weight memory, block i of the chunk using set i % k (ZeRO-3).
  int block_buffers = 0;
  // Tokens of one sequence whose keys and values extend() keeps; 0: none. Needs
  // the whole model in one stage.
  int64_t cache = 0;
  // Weight of the square of the log of the softmax's normaliser in the loss
  // that backward() differentiates (PaLM, Chowdhery et al. 2022). forward()
  // returns the loss without it.
  double z_loss = 0;
  // With adapters (ModelConfig::lora): what they are added to. It must be
  // filled in by the first load_unit() and stay.
  BaseWeights base;
  // The matrices of layers whose gradients are wanted, and no others; empty: of
  // all parameters. Some of the others may be computed all the same.
  std::vector<geometry::Role> trained;
  comm::Comm* tp = nullptr;  // nullptr: degree 1
  comm::Comm* cp = nullptr;
};

// tokens[b * (T/cp) + t] is the input at local position t, targets the token
// that follows it, or -1 where the loss does not count.
// REQUIRES: every other id is in [0, vocab_size).
struct MicroBatch {
  const int32_t* tokens_BT = nullptr;   // read by the first stage
  const int32_t* targets_BT = nullptr;  // read by the last stage
  int64_t B = 0;
  int64_t T = 0;  // of the complete sequence; a multiple of 2 cp if cp > 1
  // Ascending b * T + t of the tokens of complete sequences, t > 0, that begin
  // a document: tokens from there on do not see those before.
  std::span<const int64_t> document_starts;
};

// The documents of all sequences; none if each sequence is one.
std::vector<kernels::Document> documents_of(const MicroBatch& mb);

// Positions in the sequence of the T / cp tokens of context-parallel rank i:
// pieces i and 2 cp - 1 - i of 2 cp equal ones. REQUIRES: T % (2 cp) == 0
// unless cp == 1.
std::vector<int32_t> context_positions(int64_t T, int cp, int cp_index);

// Callbacks to the owner of weights and gradients during passes. Units are
// indices into ShardTable::units(). Pointers must stay valid until the pass
// ends (grads: until ready()).
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // The pass is about to compute with unit u: on return its weights have been
  // loaded (load_unit) and not been overwritten since.
  virtual void need(int unit) = 0;
  // This pass no longer needs unit u's weights.
  virtual void release(int unit) = 0;
  // The numel() fp32 elements to which the gradient of unit u is added. Neither
  // this nor ready() is called for units of which nothing is trained.
  virtual float* grads(int unit) = 0;
  // The gradient of unit u will not change any more in this microbatch.
  virtual void ready(int unit) = 0;
};

class Stage {
 public:
  // Fails when sizes are invalid (naming what is allowed), memory is short, or
  // the backend does not support the dtype on this machine. `backend`, `shard`
  // and the comms must outlive the stage.
  static Result<std::unique_ptr<Stage>> create(
      const geometry::ShardTable& shard, const StageOptions& options,
      kernels::Backend& backend);
  virtual ~Stage() = default;

  // Rows of the residual stream that this rank holds for B sequences of T.
  virtual int64_t stream_rows(int64_t B, int64_t T) const = 0;

  // Refreshes unit u's compute copy from fp32 `weights` (its elements, in the
  // shard table's order), which must stay valid and unchanged until the next
  // load of that unit or its release(): fp32 operands are read from there. u
  // must belong to this stage's chunk.
  virtual void load_unit(int unit, std::span<const float> weights) = 0;

  // Forward of one microbatch into `slot`. Input: tokens on the first stage,
  // else x_in, the output of the stage before: (stream_rows, dim) fp32.
  // Returns on the last stage the loss (nats) summed over this rank's N rows,
  // the same on all tensor-parallel ranks; else 0, and the activation is
  // readable at output(slot) until the slot's next forward.
  virtual double forward(int slot, const MicroBatch& mb, const float* x_in,
                         UnitHooks& hooks) = 0;
  virtual const float* output(int slot) const = 0;

  // Backward of the microbatch in `slot`. On the last stage the loss is scaled
  // by `loss_scale` (usually 1 / tokens of the global batch); else dy_out is
  // the gradient of output(slot). Adds this rank's part of the parameter
  // gradients (see shard_table.h for who has which part) where hooks.grads()
  // says, and calls hooks.ready() unit by unit, in a fixed order (last unit
  // first; a tied embedding last) unless split_backward. Returns the gradient
  // of x_in, or nullptr on the first stage; readable until the next backward.
  virtual const float* backward(int slot, double loss_scale,
                                const float* dy_out, UnitHooks& hooks) = 0;
  // split_backward only: the gradients of the weights that backward(slot) left
  // out; calls hooks.ready(). The slot is free afterwards.
  virtual void backward_weight(int slot, UnitHooks& hooks) = 0;

  // Like forward(), but keeps nothing for backward; the activation is readable
  // at evaluated() until the next call.
  virtual double evaluate(const MicroBatch& mb, const float* x_in,
                          UnitHooks& hooks) = 0;
  virtual const float* evaluated() const = 0;

  // Continues a sequence: computes with `tokens`, at most max_seq of them, at
  // the positions from length() on, and with the keys and values of the tokens
  // before. logits(0, 1, out) then gives those of what follows the last token.
  // REQUIRES: length() + tokens.size() <= StageOptions::cache.
  virtual void extend(std::span<const int32_t> tokens, UnitHooks& hooks) = 0;
  virtual int64_t length() const = 0;
  // Forgets the tokens from there on. REQUIRES: 0 <= length <= length().
  virtual void truncate(int64_t length) = 0;

  // Logits of the last evaluate()/forward(slot) for the first `rows` rows and
  // this rank's part of the vocabulary, fp32 rows x (vocabulary part);
  // recomputed, for checks only. Last stage. After evaluate() `slot` is
  // ignored.
  virtual void logits(int slot, int64_t rows, std::span<float> out) = 0;

  // Bytes held; geometry::chunk_memory() predicts them.
  struct Memory {
    uint64_t weights = 0, activations = 0, buffers = 0;
  };
  virtual Memory memory() const = 0;
};

// The families of parallel/geometry/family.h, a folder each.
// REQUIRES: Stage::create() has checked the options.
Result<std::unique_ptr<Stage>> make_llama_stage(
    const geometry::ShardTable& shard, const StageOptions& options,
    kernels::Backend& backend);
// Adapters on any family (worker/model/lora).
Result<std::unique_ptr<Stage>> make_lora_stage(
    const geometry::ShardTable& shard, const StageOptions& options,
    kernels::Backend& backend);

}  // namespace remesh::model
