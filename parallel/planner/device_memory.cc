#include "parallel/planner/device_memory.h"

#include <algorithm>
#include <cmath>

namespace remesh::planner {
namespace {

double as_double(int64_t n) { return static_cast<double>(n); }

// Of a layer and a microbatch, Korthikanti et al. 2022, section 4, for any
// widths: 10 bytes of the stream for each element (norms' inputs, inputs of
// products, dropout masks), 2 of each other product's operand, and 5 of each
// score unless attention is fused.
double layer_activations(const JobShape& s, const geometry::Layout& l,
                         const Execution& run) {
  const double N = as_double(s.B) * as_double(s.T) / l.cp, tp = l.tp;
  const double D = as_double(s.model.dim), F = as_double(s.model.hidden_dim);
  const double stream = run.sequence_parallel ? N / tp : N;
  const double kv = as_double(s.model.kv_dim());
  if (s.recompute == geometry::Recompute::kFull) return 2 * stream * D;
  double bytes =
      10 * stream * D +
      N / tp * (4 * D + 4 * kv + (s.model.arch == "gpt" ? 4 : 6) * F);
  if (!run.fused_attention && s.recompute == geometry::Recompute::kNone)
    bytes += 5 * N * as_double(s.T) * as_double(s.model.n_heads) / tp;
  return bytes;
}

}  // namespace

DeviceMemory device_memory(const JobShape& s, const geometry::Layout& l,
                           const Execution& run) {
  const double layers = std::ceil(as_double(s.model.n_layers) / l.pp);
  const double copies = l.pp == 1 && !s.model.tie_embeddings ? 2 : 1;
  const double n =
      layers * layer_elements(s, l) + copies * vocabulary_elements(s, l);
  const double z = shard_group_on(s, l);
  DeviceMemory m;
  m.weights = 2 * n / (s.zero_stage >= 3 ? z : 1);
  m.gradients = run.gradient_bytes * n / (s.zero_stage >= 2 ? z : 1);
  m.optimizer = 12 * n / (s.zero_stage >= 1 ? z : 1);
  const double v = chunks_on(s, l);
  // Microbatches in flight on the first rank, in stages of all chunks:
  // Narayanan et al. 2021, section 2.2.
  const double live = std::min(as_double(most_microbatches(s, l)),
                               l.pp + (v > 1 ? (l.pp - 1) / v : 0));
  m.activations = live * layers * layer_activations(s, l, run);
  return m;
}

}  // namespace remesh::planner
