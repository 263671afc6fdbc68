// Stage: one pipeline stage of a Llama model, forward and backward.
//
// A stage owns activations and compute copies of its weights; master weights
// and gradients are flat fp32 vectors owned by the caller, laid out by the
// ParamTable (parallel/geometry). It knows no optimizer, data or daemon. All
// arithmetic goes through a kernels::Backend, so nothing here knows the device.
//
// Several microbatches may be in flight between forward and backward (pipeline
// schedules): each uses one of `num_slots` activation slots.
//
// Not thread-safe: one Stage belongs to one thread (its kernels may use many).
// Deterministic: the same inputs and thread count give the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "parallel/geometry/param_table.h"
#include "proto/base/status.h"
#include "worker/kernels/dtype.h"

namespace remesh::kernels {
class Backend;
}

namespace remesh::model {

using Dtype = kernels::Dtype;
enum class Recompute { kNone, kFull };

struct StageOptions {
  int64_t first_layer = 0;
  int64_t num_layers = 0;     // this stage's blocks
  bool has_embedding = true;  // first stage
  bool has_head = true;       // last stage: final norm, head, loss
  Dtype dtype = Dtype::kFp32;
  // Takes dtype even where Backend::product_dtype() prefers fp32: for tests of
  // bf16 with small models.
  bool keep_dtype = false;
  Recompute recompute = Recompute::kNone;
  int64_t max_batch = 1;  // sequences a microbatch, B
  int64_t max_seq = 1;    // tokens a sequence, T
  int num_slots = 1;      // microbatches in flight
};

// tokens_BT[b * T + t] is the input, targets_BT the token after it.
// REQUIRES: every id in [0, vocab_size).
struct MicroBatch {
  const int32_t* tokens_BT = nullptr;   // read by the first stage
  const int32_t* targets_BT = nullptr;  // read by the last stage
  int64_t B = 0;
  int64_t T = 0;
};

class Stage {
 public:
  // Fails when sizes are refused, memory is short, or the backend cannot do
  // the dtype on this machine (kernels::Backend::supports_bf16()). `backend`
  // and `table` must outlive the stage.
  static Result<std::unique_ptr<Stage>> create(
      const geometry::ParamTable& table, const StageOptions& options,
      kernels::Backend& backend);
  virtual ~Stage() = default;

  // What the products run in: the options' dtype, or fp32 where the backend
  // finds that bf16 does not pay (kernels::Backend::product_dtype()).
  virtual Dtype dtype() const = 0;

  // Refreshes the compute copies from `master` (flat fp32, table order,
  // num_elements long). Call after every change of the weights. `master` must
  // stay valid and unchanged until the next load: what is computed in fp32
  // (everything with Dtype::kFp32; the embedding with bf16) is read from it.
  virtual void load_weights(std::span<const float> master) = 0;

  // Forward of one microbatch into `slot`. Input: tokens on the first stage,
  // else the activation x_in from the stage before: the residual stream,
  // (B*T, dim), fp32 whatever the dtype, so that cutting a model into stages
  // changes no bit. Output: on the last stage the summed loss (nats) over the
  // B*T tokens is returned; else 0 and the activation is readable at
  // output(slot).
  virtual double forward(int slot, const MicroBatch& mb, const float* x_in) = 0;
  virtual const float* output(int slot) const = 0;

  // Backward of the microbatch in `slot`. On the last stage the loss is scaled
  // by `loss_scale` (usually 1 / tokens of the global batch); else dy_out is
  // the gradient of output(slot). ADDS parameter gradients into `grads` (flat
  // fp32, table order). Returns the gradient of x_in, or nullptr on the first
  // stage; the gradient is readable until the next call. `on_ready(i)`, when
  // given, is called once the gradient of parameter i will not change any more
  // in this call, in a fixed order (roughly last parameter first); with tied
  // embeddings the shared one is called last.
  virtual const float* backward(
      int slot, double loss_scale, const float* dy_out, std::span<float> grads,
      const std::function<void(size_t)>& on_ready) = 0;

  // Forward without keeping anything for backward; as forward() otherwise.
  virtual double evaluate(const MicroBatch& mb, const float* x_in) = 0;

  // Logits of the last evaluate()/forward() for the first `rows` token
  // positions, fp32 rows x vocab; recomputed, for checks only. Last stage.
  // After evaluate() `slot` is ignored.
  virtual void logits(int slot, int64_t rows, std::span<float> out) = 0;

  // Bytes held, by category, for the memory report.
  struct Memory {
    uint64_t weights = 0, activations = 0, buffers = 0;
  };
  virtual Memory memory() const = 0;
};

}  // namespace remesh::model
