#include "parallel/planner/step_cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/model_work.h"
#include "parallel/geometry/schedule.h"
#include "parallel/geometry/slice.h"
#include "parallel/planner/collective.h"
#include "parallel/planner/memory.h"

namespace remesh::planner {
namespace {

// fp32 weight, two moments and gradient read; weight, moments and the 16-bit
// copy written; the gradient's norm and clipping.
constexpr double kOptimizerBytes = 16 + 14 + 8;

class Step {
 public:
  Step(const Machine& m, const JobShape& s, const geometry::Layout& l,
       const Execution& run, const Parts& parts)
      : m_(m),
        s_(s),
        l_(l),
        run_(run),
        parts_(parts),
        chunks_(chunks_on(s, l)),
        num_stages_(l.pp * chunks_),
        layer_(parts.layer),
        head_(parts.head) {
    if (run.recomputes_attention &&
        s.recompute == geometry::Recompute::kSelective &&
        geometry::traits_of(schedule_kind_on(s, l)).split_backward)
      layer_.again = {};
    sharded_ =
        l.dp * l.cp > 1 &&
        (run.accumulates ? s.zero_stage == 3 : s.zero_stage >= 2 && l.pp == 1);
    if (sharded_) add_sharded_traffic();
    if (!sharded_ || run.accumulates) add_accumulation();
    if (run.balanced_stages && l.pp > 1) {
      auto bounds = geometry::split_layers(s.model.n_layers, num_stages_,
                                           {.head = parts.head_layers});
      CHECK(bounds.ok());
      bounds_ = *std::move(bounds);
    }
  }

  Terms run() {
    Terms t;
    if (l_.pp == 1) {
      t = as_double(most_microbatches(s_, l_)) * stage(0).all();
    } else {
      for (int i = 0; i < num_stages_; ++i) stages_.push_back(stage(i));
      // While the busiest rank waits less and less, another sets the pace.
      const auto settled = [](const Terms& a, const Terms& b) {
        return b.bubble >= a.bubble - 1e-9 * a.total();
      };
      t = step_time(
          most_microbatches(s_, l_), l_.pp,
          [&](int64_t n) { return simulate(n); }, settled);
      t.bubble += std::max(0.0, pipeline_bound() - t.total());
    }
    t += after_backward();
    t.replicas = replicas_s(t);
    t.straggle = straggle() * t.total();
    return t;
  }

  double lower_bound_s() const {
    const double passes = l_.pp == 1 ? as_double(most_microbatches(s_, l_)) *
                                           stage(0).all().total()
                                     : pipeline_bound();
    return (passes + after_backward().total()) * (1 + straggle());
  }

 private:
  Group data_group(int size) const { return {size, l_.tp}; }
  double straggle() const { return m_.straggle * slowest_of(l_.world()); }

  double rank_elements() const {
    const double stages = l_.pp;
    const double layers = std::ceil(as_double(s_.model.n_layers) / stages);
    return layers * parts_.layer_elements +
           parts_.vocabulary_elements *
               (l_.pp == 1 && !s_.model.tie_embeddings ? 2 : 1);
  }

  // Reduce-scatter of a gradient in the shard group, then across replicas.
  double reduce_s(double elements) const {
    const int n = l_.dp * l_.cp, z = shard_group_on(s_, l_);
    double t = gather_s(m_, data_group(z), elements * run_.gradient_bytes);
    if (z < n)
      t += all_reduce_s(m_, {n / z, l_.tp * z},
                        elements / z * run_.gradient_bytes);
    return t;
  }
  double gather_weights_s(double elements) const {
    return gather_s(m_, data_group(shard_group_on(s_, l_)),
                    elements * run_.weight_bytes);
  }

  void add_sharded_traffic() {
    const auto add = [&](double elements, Passes* p) {
      const double gather = gather_weights_s(elements);
      const double reduce = run_.accumulates ? 0 : reduce_s(elements);
      const double back = (p->backward + p->weight + p->again).total();
      double forward = gather, backward = reduce;
      if (s_.zero_stage == 3) backward += gather;
      if (run_.overlap_data) {
        forward = exposed_s(m_, forward, p->forward.total());
        backward = exposed_s(m_, backward, back);
      }
      p->forward.data += forward;
      p->backward.data += backward;
    };
    add(parts_.layer_elements, &layer_);
    if (!run_.accumulates) add(parts_.vocabulary_elements, &head_);
  }

  void add_accumulation() {
    const double per_element = run_.accumulation_bytes / m_.memory_bytes_per_s;
    layer_.weight.elementwise += per_element * parts_.layer_elements;
    head_.weight.elementwise += per_element * parts_.vocabulary_elements;
  }

  double layers_of(int stage) const {
    const auto i = static_cast<size_t>(stage);
    if (!bounds_.empty()) return as_double(bounds_[i + 1] - bounds_[i]);
    return as_double(
        geometry::even_share(s_.model.n_layers, num_stages_, stage).size());
  }
  Passes stage(int i) const {
    const double layers = layers_of(i);
    Passes p{layers * layer_.forward, layers * layer_.backward,
             layers * layer_.weight, layers * layer_.again};
    const auto add = [&](const Passes& o) {
      p.forward += o.forward;
      p.backward += o.backward;
      p.weight += o.weight;
    };
    if (i == 0) add(parts_.embedding);
    if (i + 1 == num_stages_) add(head_);
    return p;
  }

  // The length of a pass, with the messages that it waits for.
  Terms pass_terms(geometry::Pass pass, size_t stage, bool split) const {
    const Passes& p = stages_[stage];
    Terms t;
    switch (pass) {
      case geometry::Pass::kForward:
        t = p.forward;
        break;
      case geometry::Pass::kBackward:
        t = p.backward + p.again;
        if (!split) t += p.weight;
        break;
      case geometry::Pass::kWeight:
        return p.weight;
    }
    t.transfer += transfer_s();
    return t;
  }
  double transfer_s() const {
    return message_s() * (run_.overlap_pipeline ? m_.contention : 1);
  }
  double latency_s() const { return run_.overlap_pipeline ? message_s() : 0; }
  double message_s() const {
    const double bytes = as_double(s_.B) * as_double(s_.T) / l_.cp *
                         as_double(s_.model.dim) * run_.message_bytes;
    // The pipeline is as fast as its slowest link.
    const int stride = slowest_stride(m_, l_.world(), l_.tp * l_.cp * l_.dp);
    return send_s(m_, stride, bytes / l_.tp);
  }

  // A step of n microbatches; the terms are those of the busiest rank.
  Terms simulate(int64_t n) const {
    const geometry::Schedule schedule =
        geometry::without_padding(schedule_on(s_, l_, n), n);
    std::vector<double> length[3];
    for (int pass = 0; pass < 3; ++pass)
      for (size_t i = 0; i < stages_.size(); ++i)
        length[pass].push_back(pass_terms(static_cast<geometry::Pass>(pass), i,
                                          schedule.split_backward)
                                   .total());
    const auto timing = geometry::replay(
        schedule,
        [&](int rank, size_t op) {
          const geometry::PipeOp& o =
              schedule.ranks[static_cast<size_t>(rank)][op];
          return length[static_cast<size_t>(o.pass)]
                       [static_cast<size_t>(schedule.stage(rank, o.chunk))];
        },
        latency_s());
    CHECK(timing.ok());
    const auto busiest = static_cast<size_t>(
        std::ranges::max_element(timing->busy) - timing->busy.begin());
    Terms t;
    for (const geometry::PipeOp& o : schedule.ranks[busiest])
      t += pass_terms(o.pass,
                      static_cast<size_t>(
                          schedule.stage(static_cast<int>(busiest), o.chunk)),
                      schedule.split_backward);
    t.bubble = timing->makespan - t.total();
    return t;
  }

  struct Load {
    double forward = 0, backward = 0, weight = 0;
  };
  Load load(int i) const {
    const auto sum = [&](const auto& seconds) {
      return layers_of(i) * seconds(layer_) +
             (i == 0 ? seconds(parts_.embedding) : 0) +
             (i + 1 == num_stages_ ? seconds(head_) : 0);
    };
    const auto forward = [](const Passes& p) { return p.forward.total(); };
    const auto backward = [](const Passes& p) {
      return p.backward.total() + p.again.total();
    };
    const auto weight = [](const Passes& p) { return p.weight.total(); };
    return {sum(forward) + transfer_s(), sum(backward) + transfer_s(),
            sum(weight)};
  }

  // A bound for each rank: forward passes of the ranks before it, its own
  // passes, backward passes of the ranks before it. A split backward may
  // compute weight gradients while these run.
  double pipeline_bound() const {
    const bool split =
        geometry::traits_of(schedule_kind_on(s_, l_)).split_backward;
    const int64_t m = most_microbatches(s_, l_);
    double fill = 0, drain = 0, bound = 0;
    for (int rank = 0; rank < l_.pp; ++rank) {
      double inputs = 0, weights = 0;
      for (int i = rank; i < num_stages_; i += l_.pp) {
        const Load x = load(i);
        inputs += as_double(m) * (x.forward + x.backward);
        weights += as_double(m) * x.weight;
      }
      bound = std::max(
          bound,
          fill + inputs + (split ? std::max(weights, drain) : weights + drain));
      const Load first = load(rank);
      fill += first.forward + latency_s();
      drain += first.backward + (split ? 0 : first.weight) + latency_s();
    }
    return bound;
  }

  Terms after_backward() const {
    const int n = l_.dp * l_.cp, z = shard_group_on(s_, l_);
    const double elements = rank_elements();
    Terms t;
    t.optimizer = kOptimizerBytes * elements / z / m_.memory_bytes_per_s;
    if (n == 1 || (sharded_ && !run_.accumulates)) return t;
    double back = 0, forward = 0;  // of the last and the first microbatch
    for (int i = 0; i < num_stages_; i += l_.pp) {
      const Passes p = stage(i);
      back += (p.backward + p.weight + p.again).total();
      forward += p.forward.total();
    }
    double gradients = 0, weights = 0;
    if (z == 1) {
      gradients =
          all_reduce_s(m_, data_group(n), elements * run_.gradient_bytes);
    } else {
      gradients = reduce_s(elements);
      // Stage 3 has gathered those of layers.
      weights =
          gather_weights_s(sharded_ ? parts_.vocabulary_elements : elements);
    }
    t.data = run_.overlap_data ? exposed_s(m_, gradients, back) +
                                     exposed_s(m_, weights, forward)
                               : gradients + weights;
    return t;
  }

  // Replicas move while the next step computes and arrive before it ends. Each
  // end reads, hashes, copies and writes what it sends or receives. Hosts of
  // other data-parallel ranks have the same state anyway.
  double replicas_s(const Terms& step) const {
    constexpr double kBytes = 12, kPasses = 8;
    const int z = shard_group_on(s_, l_), hosts = hosts_of(l_.world());
    int64_t kept = replicas_kept(s_, l_);
    if (hosts > 1 && s_.keep_state && s_.replicate_every > 0) {
      const int have =
          std::min(l_.dp * l_.cp / z, hosts_of(l_.dp * l_.cp * l_.tp));
      kept = std::clamp<int64_t>(s_.replicas + 1 - have, 0, hosts - have);
    }
    if (kept == 0) return 0;
    const double bytes = as_double(kept) * kBytes * rank_elements() / z;
    const double move = hosts > 1 ? bytes / m_.network_bytes_per_s : 0;
    const double behind = step.total() - step.exposed();
    return (kPasses * bytes / m_.memory_bytes_per_s +
            std::max(0.0, move - behind)) /
           as_double(s_.replicate_every);
  }
  int hosts_of(int ranks) const {
    return (ranks + m_.node_devices - 1) / m_.node_devices;
  }

  const Machine& m_;
  const JobShape& s_;
  const geometry::Layout& l_;
  const Execution& run_;
  const Parts& parts_;
  const int chunks_;
  const int num_stages_;
  Passes layer_, head_;           // with their data-parallel traffic
  bool sharded_ = false;          // every pass gathers weights
  geometry::StageBounds bounds_;  // empty: the same number of layers each
  std::vector<Passes> stages_;
};

}  // namespace

double slowest_of(int n) {
  if (n < 2) return 0;
  const double t = std::sqrt(-2 * std::log(0.625 / (n + 0.25)));
  return t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                 (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
}

StepCost predict_step(const Machine& m, const JobShape& s,
                      const geometry::Layout& l, const Execution& run) {
  return predict_step(m, s, l, run, parts_of(m, s, l, run));
}

StepCost predict_step(const Machine& m, const JobShape& s,
                      const geometry::Layout& l, const Execution& run,
                      const Parts& parts) {
  StepCost c;
  c.terms = Step(m, s, l, run, parts).run();
  c.total_s = c.terms.total();
  const double tokens =
      as_double(s.microbatches) * as_double(s.B) * as_double(s.T);
  c.tokens_per_s = tokens / c.total_s / l.world();
  geometry::Layout one;
  const double keys = geometry::mean_keys(s.model, s.T);
  const double work =
      as_double(s.model.n_layers) *
          (layer_elements(s, one) + 2 * as_double(s.model.q_dim()) * keys) +
      vocabulary_elements(s, one);
  c.mfu = 6 * work * c.tokens_per_s / peak_flops(m, run.precision);
  return c;
}

double step_lower_bound_s(const Machine& m, const JobShape& s,
                          const geometry::Layout& l, const Execution& run,
                          const Parts& parts) {
  return Step(m, s, l, run, parts).lower_bound_s();
}

}  // namespace remesh::planner
