#include "parallel/planner/layer_cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/geometry/lora.h"
#include "parallel/geometry/model_work.h"
#include "parallel/geometry/param_table.h"
#include "parallel/planner/collective.h"

namespace remesh::planner {
namespace {

using geometry::Role;

double operand_bytes(Precision p) {
  return p == Precision::k32 ? 4 : p == Precision::k16 ? 2 : 1;
}

// Sizes of one rank's share of a microbatch.
struct Sizes {
  double N, T, D, q, kv, F,
      V;          // tokens, sequence, widths / tp, vocabulary / tp
  double heads;   // / tp
  double stream;  // tokens of the residual stream
  double inner;   // widths read and written by the activation
};
Sizes sizes_of(const JobShape& s, const geometry::Layout& l,
               const Execution& run) {
  const double N = as_double(s.B) * as_double(s.T) / l.cp;
  const double tp = l.tp;
  // Ranks beyond the number of key/value heads hold copies of them.
  const double kv =
      as_double(s.model.kv_dim()) / std::min(tp, as_double(s.model.n_kv_heads));
  return {.N = N,
          .T = as_double(s.T),
          .D = as_double(s.model.dim),
          .q = as_double(s.model.q_dim()) / tp,
          .kv = kv,
          .F = as_double(s.model.hidden_dim) / tp,
          .V = as_double(s.model.vocab_size) / tp,
          .heads = as_double(s.model.n_heads) / tp,
          .stream = run.sequence_parallel ? N / tp : N,
          .inner = (s.model.arch == "gpt" ? 2 : 3) *
                   as_double(s.model.hidden_dim) / tp};
}

// The matrices of a layer as (outputs, inputs) of one rank, those with the same
// input as one, from the table that the engine runs.
struct Matrix {
  double out = 0, in = 0;
  bool trained = false;
};
constexpr size_t kUpMatrix = 2;  // of matrices(): gate and up
std::vector<Matrix> matrices(const JobShape& s, const geometry::Layout& l) {
  geometry::ModelConfig one = model_of_engine(s.model.base());
  one.n_layers = 1;
  Matrix qkv, output, up, down;
  const geometry::ParamTable table = geometry::ParamTable::make(one);
  for (const geometry::ParamSpec& p : table.specs()) {
    if (p.layer != 0 || p.shape.size() != 2) continue;
    const double rows = as_double(p.shape[0]), columns = as_double(p.shape[1]);
    const geometry::Lora& lora = s.model.lora;
    const bool trained = lora.rank == 0 || has_adapter(p, lora);
    const auto add = [&](Matrix& w, double out, double in) {
      w = {w.out + out, in, w.trained || trained};
    };
    switch (p.role) {
      case Role::kQuery:
        add(qkv, rows / l.tp, columns);
        break;
      case Role::kKey:
      case Role::kValue:  // ranks beyond the number of heads hold copies
        add(qkv, rows / as_double(std::min<int64_t>(l.tp, one.n_kv_heads)),
            columns);
        break;
      case Role::kOutput:
        add(output, rows, columns / l.tp);
        break;
      case Role::kGate:
        if (s.model.arch != "gpt") add(up, rows / l.tp, columns);
        break;
      case Role::kUp:
        add(up, rows / l.tp, columns);
        break;
      case Role::kDown:
        add(down, rows, columns / l.tp);
        break;
      default:
        break;
    }
  }
  return {qkv, output, up, down};
}

Terms elementwise(const Machine& m, double bytes) {
  return {.elementwise = bytes / m.memory_bytes_per_s};
}

// The device waits where the host launches operations more slowly than it runs
// them.
void add_launches(const Machine& m, double operations, Terms* t) {
  t->launch += std::max(0.0, operations * m.launch_s - t->total());
}

void add_linear(const Machine& m, const Sizes& z, const Matrix& w, Precision p,
                Passes* out) {
  out->forward.gemm += gemm_s(m, {z.N, w.out, w.in}, p);
  out->backward.gemm += gemm_s(m, {z.N, w.in, w.out}, p);
  if (w.trained) out->weight.gemm += gemm_s(m, {w.out, w.in, z.N}, p);
}

// Causal attention: QK' and PV take 2 N q each for every key that a query sees;
// backward has five products instead of two, at 0.86 of forward's
// rate (Dao 2023: 63 % of an A100's peak instead of 73 %). Blocks of 128 on the
// diagonal are computed in full.
constexpr double kAttentionBlock = 128;
constexpr double kAttentionBackward = 2.5 / 0.86;
// Bytes that softmax, mask and dropout move for each score where they are
// operations of their own, in 16 bits: forward 2 + 2 for scale, mask and
// softmax, 2 + 2 + 1 for dropout; backward 2 + 1 + 2 and 2 + 2 + 2.
constexpr double kScoreForward = 9, kScoreBackward = 11;

Passes attention(const Machine& m, const JobShape& s, const geometry::Layout& l,
                 const Sizes& z, const Execution& run) {
  Passes p;
  if (run.fused_attention) {
    const double rate = run.precision == Precision::k32 ? m.fp32_attention_flops
                        : run.tuned_attention ? m.tuned_attention_flops
                                              : m.attention_flops;
    const double keys = geometry::mean_keys(s.model, s.T);
    const double forward = 2 * z.N * (2 * keys + kAttentionBlock) * z.q / rate;
    p.forward.attention = forward;
    p.backward.attention = kAttentionBackward * forward;
    return p;
  }
  const double count = as_double(s.B) * z.heads;
  const double rows = z.T / l.cp, head = as_double(s.model.head_dim());
  const double products = gemm_s(m, {rows, z.T, head, count}, Precision::k16) +
                          gemm_s(m, {rows, head, z.T, count}, Precision::k16);
  const double scores = count * rows * z.T;
  p.forward.attention =
      products + kScoreForward * scores / m.memory_bytes_per_s;
  p.backward.attention =
      2 * products + kScoreBackward * scores / m.memory_bytes_per_s;
  return p;
}

// Bytes moved in forward by what is neither a matrix product nor attention, in
// 16 bits, fused: two norms (2 + 2 each) and two residual additions with
// dropout (2 + 2 + 2 + 1) for each element of the stream; query, key and value
// once read and written; the activation function. Backward moves twice as much.
// Separate operations, as in eager PyTorch, move half as much again, by the 7
// to 16 % that torch.compile gains with Llama 3 8B (arXiv 2410.06511, table 1).
constexpr double kUnfused = 1.5;
double elementwise_bytes(const Sizes& z, const Execution& run) {
  const double width = operand_bytes(run.precision) == 4 ? 2 : 1;
  const double stream = 22 * z.stream * z.D;
  const double inner = z.N * (4 * (z.q + 2 * z.kv) + 2 * z.inner);
  double bytes = width * (stream + inner) * (run.fused_kernels ? 1 : kUnfused);
  // fp8: inputs are read in 16 bits and written in fp8, also transposed; scales
  // by row need another pass over them.
  if (run.precision == Precision::kFp8)
    bytes += (run.row_scaled ? 2 : 1) * 4 * z.N * (2 * z.D + z.q + z.F);
  return bytes;
}

// Operations that the host launches for a layer's forward: matrix products,
// views and copies, elementwise chains; backward launches twice as many. A
// count only matters times Machine::launch_s, which is fitted to small models.
double operations(const Execution& run) {
  return (run.fused_kernels ? 30 : 45) + (run.fused_attention ? 0 : 10);
}

// Bytes of an element that ranks exchange as it was computed, and of one that
// they add up.
double sent_bytes(const Execution& run) {
  return std::max(2.0, operand_bytes(run.precision));
}
double summed_bytes(const Execution& run) {
  return run.sum_bytes > 0 ? run.sum_bytes : sent_bytes(run);
}

// Two all-reduces of the stream forward and two backward (Shoeybi et al. 2019),
// or as many all-gathers and reduce-scatters (Korthikanti et al. 2022), which
// move as much. In pieces (Wang et al. 2023) all but the first are hidden by
// the products beside them; that takes direct access to the memory of the
// others, which devices of a node have.
double tensor_s(const Machine& m, const geometry::Layout& l, const Sizes& z,
                const Execution& run, double gemm) {
  if (l.tp == 1) return 0;
  const double width = sent_bytes(run), sum = summed_bytes(run);
  const double elements = z.N * z.D;
  const Group group{.size = l.tp, .stride = 1};
  const double all = run.sequence_parallel
                         ? 2 * (gather_s(m, group, elements * width) +
                                gather_s(m, group, elements * sum))
                         : 2 * all_reduce_s(m, group, elements * sum);
  if (!run.overlap_tensor || l.tp > m.node_devices) return all;
  return std::max(all / l.tp, all - gemm);
}

// Keys and values travel around the ring, which takes a hop less than there are
// ranks, in forward and in backward, and in backward their gradients back to
// where they came from, behind attention (Liu et al. 2023). All wait for the
// slowest link of the ring.
void add_context(const Machine& m, const geometry::Layout& l, const Sizes& z,
                 const Execution& run, Passes* p) {
  if (l.cp == 1) return;
  const int stride = slowest_stride(m, l.tp * l.cp, l.tp);
  const double elements = 2 * z.N * z.kv;
  const double keys =
      (l.cp - 1) * send_s(m, stride, elements * sent_bytes(run));
  const double gradients =
      l.cp * send_s(m, stride, elements * summed_bytes(run));
  const double share = (l.cp - 1.0) / l.cp;
  p->forward.context = exposed_s(m, keys, share * p->forward.attention);
  p->backward.context =
      exposed_s(m, keys + gradients, share * p->backward.attention);
}

// Bytes that the sums of a ring move, in fp32: each step's output is merged
// with those before, which are read and written, and its gradients are cleared,
// written and added to those that arrive; keys and values are packed, outputs
// and gradients converted.
void add_ring_sums(const Machine& m, const geometry::Layout& l, const Sizes& z,
                   const Execution& run, Passes* p) {
  if (l.cp == 1 || !run.sums_in_ring) return;
  const double width = operand_bytes(run.precision), steps = l.cp;
  const double keys = 2 * z.kv, pack = 2 * width * keys;
  p->forward +=
      elementwise(m, z.N * (pack + (8 * (steps - 1) + 8 + width) * z.q));
  p->backward +=
      elementwise(m, z.N * (pack + (4 + 8 * steps + 4 + width) * z.q +
                            (8 * steps + 12 * (steps - 1) + 4 + width) * keys));
}

void recompute(const Machine& m, const JobShape& s, const Sizes& z,
               const Matrix& up, const Execution& run, Passes* p) {
  const double share = 1.0 / s.recompute_every;
  Terms again;
  if (s.recompute == geometry::Recompute::kFull) {
    again = p->forward;
  } else if (s.recompute == geometry::Recompute::kSelective &&
             run.recomputes_attention) {
    again.attention = p->forward.attention;
    again.context = p->forward.context;
    again.gemm = gemm_s(m, {z.N, up.out, up.in}, run.precision);
  } else if (s.recompute == geometry::Recompute::kSelective) {
    // Korthikanti et al. 2022: the attention core; with fused attention, which
    // keeps no scores, elementwise chains and every second product
    // (TorchTitan's selective checkpointing).
    if (run.fused_attention) {
      again.gemm = p->forward.gemm / 2;
      again.elementwise = p->forward.elementwise;
    } else {
      again.attention = p->forward.attention;
    }
  }
  p->again = share * again;
}

Passes embedding_passes(const Machine& m, const JobShape& s,
                        const geometry::Layout& l, const Execution& run) {
  const Sizes z = sizes_of(s, l, run);
  Passes p;
  p.forward = elementwise(m, 8 * z.N * z.D);
  p.weight = elementwise(m, 8 * z.N * z.D);
  return p;
}

// The logits are written once in 16 bits and read in fp32 by the loss and its
// gradient: about 30 bytes for each.
Passes head_passes(const Machine& m, const JobShape& s,
                   const geometry::Layout& l, const Execution& run) {
  const Sizes z = sizes_of(s, l, run);
  Passes p;
  const Precision precision =
      run.precision == Precision::kFp8 ? Precision::k16 : run.precision;
  add_linear(m, z, {z.V, z.D, s.model.lora.rank == 0}, precision, &p);
  p.forward += elementwise(m, 16 * z.N * z.V);
  p.backward += elementwise(m, 14 * z.N * z.V);
  if (l.tp > 1) {
    const double once = tensor_s(m, l, z, run, 0) / 2;
    p.forward.tensor = once;
    p.backward.tensor = once;
  }
  const double n = operations(run);
  add_launches(m, n, &p.forward);
  add_launches(m, n, &p.backward);
  return p;
}

}  // namespace

double exposed_s(const Machine& m, double comm, double compute) {
  return std::max(0.0, comm - compute) + m.contention * std::min(comm, compute);
}

Terms& Terms::operator+=(const Terms& o) {
  for (const TermName& t : kTerms) this->*t.seconds += o.*t.seconds;
  return *this;
}

Terms operator*(double k, const Terms& terms) {
  Terms out;
  for (const TermName& t : kTerms) out.*t.seconds = k * terms.*t.seconds;
  return out;
}

// Tiles of the output are computed by the cores in waves; the last wave takes
// as long as a full one (NVIDIA, Matrix Multiplication Background User's
// Guide). Smaller tiles fill the last wave better and reuse operands less, at
// about these rates. The pipeline of a tile starts and ends once, which takes
// as long as gemm_ramp steps of the inner dimension. A product is never faster
// than memory delivers its operands; between two operations a device idles for
// gemm_gap_s. The defaults of both were chosen by vTrain's small models in one
// node.
double gemm_s(const Machine& m, const Gemm& g, Precision precision) {
  struct Tile {
    double rows, columns, rate;
  };
  constexpr Tile kTiles[] = {{256, 128, 1},
                             {128, 256, 1},
                             {128, 128, 0.9},
                             {128, 64, 0.7},
                             {64, 64, 0.5}};
  const bool fp8 = precision == Precision::kFp8 && m.fp8_flops > 0;
  const double rate = fp8                           ? m.fp8_flops
                      : precision == Precision::k32 ? m.fp32_flops
                                                    : m.flops;
  const double cores = as_double(m.cores);
  double seconds = 1e300;
  for (const Tile& t : kTiles) {
    const double tiles =
        std::ceil(g.rows / t.rows) * std::ceil(g.columns / t.columns) * g.count;
    const double waves = std::ceil(tiles / cores);
    const double flops =
        2 * t.rows * t.columns * (g.inner + m.gemm_ramp) * cores;
    seconds = std::min(seconds, waves * flops / (rate * t.rate));
  }
  const double width = fp8 ? 1 : operand_bytes(precision);
  const double bytes = g.count * (width * g.inner * (g.rows + g.columns) +
                                  std::max(width, 2.0) * g.rows * g.columns);
  return m.gemm_gap_s + std::max(seconds, bytes / m.memory_bytes_per_s);
}

double peak_flops(const Machine& m, Precision precision) {
  return precision == Precision::kFp8 && m.peak_fp8_flops > 0 ? m.peak_fp8_flops
                                                              : m.peak_flops;
}

Passes layer_passes(const Machine& m, const JobShape& s,
                    const geometry::Layout& l, const Execution& run) {
  const Sizes z = sizes_of(s, l, run);
  Passes p = attention(m, s, l, z, run);
  // Kernels that scale by row are no faster than in 16 bits (TorchTitan,
  // benchmarks/asyncTP_llama3_h100_2025-06).
  const Precision products = run.precision == Precision::kFp8 && run.row_scaled
                                 ? Precision::k16
                                 : run.precision;
  const std::vector<Matrix> layer = matrices(s, l);
  for (const Matrix& w : layer) add_linear(m, z, w, products, &p);
  const double bytes = elementwise_bytes(z, run);
  p.forward += elementwise(m, bytes);
  p.backward += elementwise(m, 2 * bytes);
  add_context(m, l, z, run, &p);
  add_ring_sums(m, l, z, run, &p);
  p.forward.tensor = tensor_s(m, l, z, run, p.forward.gemm);
  p.backward.tensor = tensor_s(m, l, z, run, p.backward.gemm);
  recompute(m, s, z, layer[kUpMatrix], run, &p);
  const double n = operations(run);
  add_launches(m, n, &p.forward);
  add_launches(m, 1.5 * n, &p.backward);
  add_launches(m, 0.5 * n, &p.weight);
  if (s.recompute == geometry::Recompute::kFull)
    add_launches(m, n / s.recompute_every, &p.again);
  return p;
}

// With adapters their elements, as if all of them were split.
double layer_elements(const JobShape& s, const geometry::Layout& l) {
  double n = 0;
  if (s.model.lora.rank > 0) {
    geometry::ModelConfig one = s.model;
    one.n_layers = 1;
    return as_double(geometry::ParamTable::make(one).num_elements()) / l.tp;
  }
  for (const Matrix& w : matrices(s, l)) n += w.out * w.in;
  return n;
}

double vocabulary_elements(const JobShape& s, const geometry::Layout& l) {
  if (s.model.lora.rank > 0) return 0;
  return as_double(s.model.vocab_size) * as_double(s.model.dim) / l.tp;
}

Parts parts_of(const Machine& m, const JobShape& s, const geometry::Layout& l,
               const Execution& run) {
  const geometry::ModelWork work =
      geometry::work_per_token(model_of_engine(s.model), s.T);
  return {.layer = layer_passes(m, s, l, run),
          .embedding = embedding_passes(m, s, l, run),
          .head = head_passes(m, s, l, run),
          .layer_elements = layer_elements(s, l),
          .vocabulary_elements = vocabulary_elements(s, l),
          .head_layers = work.head / (work.block + work.attention)};
}

}  // namespace remesh::planner
