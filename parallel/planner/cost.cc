#include "parallel/planner/cost.h"

#include <algorithm>

#include "parallel/geometry/model_work.h"

namespace remesh::planner {
namespace {

double as_double(int64_t n) { return static_cast<double>(n); }

struct Work {
  double layers = 0;      // of a rank
  double forward = 0;     // FLOPs of a microbatch
  double attention = 0;   // of these, attention of one layer
  double recomputed = 0;  // FLOPs repeated in backward
  double elements = 0;    // of the rank's weights
};

// Of the heaviest rank: the most layers, or the head if that is more.
Work heaviest(const JobShape& s, const geometry::Layout& l) {
  const double N = as_double(s.B) * as_double(s.T) / l.cp;
  const int64_t stages = int64_t{1} * l.pp * chunks_on(s, l);
  Work w;
  w.layers =
      as_double((s.model.n_layers + stages - 1) / stages) * chunks_on(s, l);
  const geometry::ModelWork token = geometry::work_per_token(s.model, s.T);
  w.attention = 2 * N * token.attention / l.tp;
  const double block = 2 * N * token.block / l.tp + w.attention;
  // A last stage with a large head gets fewer layers (stage_bounds).
  const double with_head =
      (as_double(s.model.n_layers) * block + 2 * N * token.head / l.tp) / l.pp;
  w.forward = std::max(w.layers * block, with_head);
  w.elements = (w.layers * token.block + token.head) / l.tp;
  const double share = w.layers / s.recompute_every;
  if (s.recompute == geometry::Recompute::kFull) w.recomputed = share * block;
  if (s.recompute == geometry::Recompute::kSelective)
    w.recomputed = share * w.attention;
  return w;
}

}  // namespace

StepEstimate estimate_step(const JobShape& s, const geometry::Layout& l,
                           const Hardware& h) {
  const Work w = heaviest(s, l);
  const double rate = h.flops_per_core * h.cores_per_rank;
  const double m = as_double(most_microbatches(s, l));
  const double pass = w.forward / rate;  // F = B = W
  const double again = w.recomputed / rate;
  StepEstimate e;
  e.compute_s = m * (3 * pass + again);
  const double bubble =
      geometry::traits_of(s.schedule)
          .bubble({.forward = pass, .backward = pass + again, .weight = pass});
  e.bubble_s = (l.pp - 1) * bubble / chunks_on(s, l);

  const auto link = [&](int span) {  // distance in ranks
    return span > h.ranks_per_host ? h.network_bytes_per_s : h.host_bytes_per_s;
  };
  const double type = s.bf16 ? 2 : 4;
  const double N = as_double(s.B) * as_double(s.T) / l.cp;
  const double stream = N * as_double(s.model.dim);
  if (l.tp > 1) {
    const double one = h.latency_s * (l.tp - 1) +
                       stream * type * (l.tp - 1) / l.tp / link(l.tp);
    e.exposed_s += 8 * one * w.layers * m;
  }
  if (l.cp > 1) {
    const double kv = 2 * N * as_double(s.model.kv_dim()) * type / l.tp;
    const double ring = (l.cp - 1) * (h.latency_s + kv / link(l.cp * l.tp));
    const double hidden = w.attention / rate;
    e.exposed_s += 3 * std::max(0.0, ring - hidden) * w.layers * m;
  }
  if (l.pp > 1) {
    const double hop = h.latency_s + stream / l.tp * 4 / link(l.world());
    e.exposed_s += 2 * (l.pp - 1) * hop * chunks_on(s, l);
  }
  const int n = l.dp * l.cp;
  if (n > 1) {
    const double over = link(n * l.tp);
    const double part = static_cast<double>(n - 1) / n;
    const double reduce =
        2 * (h.latency_s * (n - 1) + w.elements * 4 * part / over);
    e.exposed_s += std::max(0.0, reduce - 2 * pass) + h.latency_s;
    if (s.zero_stage == 3) {
      const int z = shard_group_on(s, l);
      const double gather = w.layers * h.latency_s * (z - 1) +
                            w.elements * 4 * (z - 1) / z / over;
      e.exposed_s +=
          m * (std::max(0.0, gather - pass) + std::max(0.0, gather - 2 * pass));
    }
  }
  return e;
}

}  // namespace remesh::planner
