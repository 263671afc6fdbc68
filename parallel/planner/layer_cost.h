// Time of the operations of a transformer layer, of the embedding and of the
// head on one device, for one microbatch. Pure.
//
// The matrices are those of the parameter table that the engine runs
// (geometry::ParamTable), query, key and value as one, gate and up as one; a
// model of the architecture "gpt" has no gate. Each term has its formula in
// layer_cost.cc.
#pragma once

#include "parallel/geometry/layout.h"
#include "parallel/planner/description.h"
#include "parallel/planner/shape.h"

namespace remesh::planner {

enum class Precision { k32, k16, kFp8 };

// How a trainer computes, as far as time depends on it.
struct Execution {
  Precision precision = Precision::k16;
  bool fused_attention = true;    // FlashAttention: no scores in memory
  bool tuned_attention = false;   // by the vendor's library for the device
  bool row_scaled = false;        // fp8 with a scale for each row
  bool fused_kernels = true;      // elementwise chains are one operation each
  bool sequence_parallel = true;  // Korthikanti et al. 2022, with tp > 1
  bool overlap_data = true;       // gradients and weights move during compute
  bool overlap_tensor = false;    // tensor-parallel messages too, in pieces
  bool overlap_pipeline = false;  // messages between stages
  double gradient_bytes = 4;      // of an element that is reduced
  double weight_bytes = 2;        // of an element that is gathered
  // Moved for each trained element and microbatch besides the operands of the
  // products, to convert weights and to add up gradients. Not counted where
  // each microbatch's gradients are reduced into shards.
  double accumulation_bytes = 0;
  double message_bytes = 2;  // of an element sent to the next stage
  // Of an element that tensor-parallel ranks add up, and of a gradient of keys
  // and values; 0: as wide as what is computed.
  double sum_bytes = 0;
  // All ZeRO stages sum gradients over the microbatches before they are reduced
  // and keep embedding and head gathered; stage 3 gathers the weights of layers
  // for every pass, in a pipeline as well.
  bool accumulates = false;
  // Context-parallel ranks add up outputs and gradients of attention in memory.
  bool sums_in_ring = false;
  // The last stage has fewer layers, as geometry::stage_bounds() says.
  bool balanced_stages = false;
  // Selective recomputation repeats attention and the products before the
  // activation function, and nothing where backward is split; else it is
  // TorchTitan's or, without fused attention, Megatron's.
  bool recomputes_attention = false;
};

// Seconds by cause. Communication counts where compute does not hide it.
struct Terms {
  double gemm = 0;
  double attention = 0;
  double elementwise = 0;
  double launch = 0;    // the device waits for the host
  double tensor = 0;    // tensor-parallel communication
  double context = 0;   // context-parallel
  double data = 0;      // data-parallel
  double transfer = 0;  // between pipeline stages
  double replicas = 0;  // of the state, to other hosts or workers
  double bubble = 0;    // pipeline ranks wait for each other
  double optimizer = 0;
  double straggle = 0;  // all wait for the slowest device
  double compute() const { return gemm + attention + elementwise + launch; }
  double exposed() const {
    return tensor + context + data + transfer + replicas;
  }
  double total() const {
    return compute() + exposed() + bubble + optimizer + straggle;
  }
  Terms& operator+=(const Terms& o);
  friend Terms operator+(Terms a, const Terms& b) { return a += b; }
  friend Terms operator*(double k, const Terms& t);
};

struct TermName {
  const char* key;
  const char* about;
  double Terms::*seconds;
};
inline constexpr TermName kTerms[] = {
    {"gemm", "matrix products", &Terms::gemm},
    {"attention", "attention scores", &Terms::attention},
    {"elementwise", "norms, activations, loss", &Terms::elementwise},
    {"launch", "device waits for the host", &Terms::launch},
    {"tensor", "tensor-parallel communication", &Terms::tensor},
    {"context", "context-parallel communication", &Terms::context},
    {"data", "data-parallel communication", &Terms::data},
    {"transfer", "messages between stages", &Terms::transfer},
    {"replicas", "replicas of the state", &Terms::replicas},
    {"bubble", "stages wait for each other", &Terms::bubble},
    {"optimizer", "update of the weights", &Terms::optimizer},
    {"straggle", "all wait for the slowest device", &Terms::straggle}};

// What shows of communication that runs behind compute: what is longer, and
// Machine::contention of the rest. Its default was chosen by FSDP runs with few
// tokens for each device (MPT-13B and Llama 2 on H100).
double exposed_s(const Machine& machine, double comm, double compute);

// Forward, and backward in two parts: the gradient of the input, and that of
// the weights. What recomputation repeats is in `again`, run before backward.
struct Passes {
  Terms forward, backward, weight, again;
  Terms all() const { return forward + backward + weight + again; }
};

// One GEMM (rows x inner times inner x columns), `count` of them at once.
struct Gemm {
  double rows = 0, columns = 0, inner = 0;
  double count = 1;
};
double gemm_s(const Machine& machine, const Gemm& gemm, Precision precision);

// What MFU refers to: in fp8 the peak in fp8, otherwise that in 16 bits.
double peak_flops(const Machine& machine, Precision precision);

// REQUIRES: the layout divides the model's heads and the sequence.
Passes layer_passes(const Machine& machine, const JobShape& shape,
                    const geometry::Layout& layout, const Execution& run);

// Elements of the matrices of a layer on one rank, and of embedding or head.
double layer_elements(const JobShape& shape, const geometry::Layout& layout);
double vocabulary_elements(const JobShape& shape,
                           const geometry::Layout& layout);

// All of the above, and of embedding and head. They depend on the layout's tp
// and cp, and on the shape's model, T, B and recompute; a search computes them
// once for these.
struct Parts {
  Passes layer, embedding, head;
  double layer_elements = 0, vocabulary_elements = 0;
  double head_layers = 0;  // the work of the head in layers, for stage_bounds()
};
Parts parts_of(const Machine& machine, const JobShape& shape,
               const geometry::Layout& layout, const Execution& run);

}  // namespace remesh::planner
