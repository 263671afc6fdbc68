#include "parallel/planner/step_cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/model_work.h"
#include "parallel/planner/collective.h"

namespace remesh::planner {
namespace {

// Chosen by FSDP runs with few tokens for each device (MPT-13B and Llama 2 on
// H100), whose exposed communication it explains.
constexpr double kContention = 0.3;
// fp32 weight, two moments and gradient read; weight, moments and the 16-bit
// copy written; the gradient's norm and clipping.
constexpr double kOptimizerBytes = 16 + 14 + 8;

double as_double(int64_t n) { return static_cast<double>(n); }

// Hides `comm` behind `compute`; returns what shows.
double exposed(double comm, double compute) {
  return std::max(0.0, comm - compute) + kContention * std::min(comm, compute);
}

class Step {
 public:
  Step(const Machine& m, const JobShape& s, const geometry::Layout& l,
       const Execution& run)
      : m_(m), s_(s), l_(l), run_(run), chunks_(chunks_on(s, l)) {
    elements_ = layer_elements(s, l);
    layer_ = layer_passes(m, s, l, run);
    embedding_ = embedding_passes(m, s, l, run);
    head_ = head_passes(m, s, l, run);
    sharded_ = s.zero_stage >= 2 && l.dp * l.cp > 1;
    if (sharded_) add_sharded_traffic();
  }

  Terms run() {
    const size_t stages = static_cast<size_t>(l_.pp) * chunks();
    for (size_t i = 0; i < stages; ++i) stages_.push_back(stage(i));
    Terms t = l_.pp == 1
                  ? as_double(most_microbatches(s_, l_)) * stages_[0].all()
                  : pipeline();
    t += after_backward();
    t.straggle = m_.straggle * std::sqrt(2 * std::log(l_.world())) * t.total();
    return t;
  }

 private:
  size_t chunks() const { return static_cast<size_t>(chunks_); }
  Group data_group(int size) const { return {size, l_.tp}; }

  double rank_elements() const {
    const double stages = l_.pp;
    const double layers = std::ceil(as_double(s_.model.n_layers) / stages);
    return layers * elements_ +
           vocabulary_elements(s_, l_) *
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
    return gather_s(m_, data_group(shard_group_on(s_, l_)), elements * 2);
  }

  void add_sharded_traffic() {
    const auto add = [&](double elements, Passes* p) {
      const double gather = gather_weights_s(elements);
      const double reduce = reduce_s(elements);
      const double back = (p->backward + p->weight + p->again).total();
      double forward = gather, backward = reduce;
      if (l_.pp > 1) {  // once a step, of m microbatches
        const double m = as_double(most_microbatches(s_, l_));
        forward = gather / m;
        backward = reduce / m;
      } else if (s_.zero_stage == 3) {
        backward += gather;
      }
      if (run_.overlap_data) {
        forward = exposed(forward, p->forward.total());
        backward = exposed(backward, back);
      }
      p->forward.data += forward;
      p->backward.data += backward;
    };
    add(elements_, &layer_);
    add(vocabulary_elements(s_, l_), &head_);
  }

  Passes stage(size_t i) const {
    const int stages = l_.pp * chunks_;
    const double layers = as_double(
        geometry::even_share(s_.model.n_layers, stages, static_cast<int>(i))
            .size());
    Passes p{layers * layer_.forward, layers * layer_.backward,
             layers * layer_.weight, layers * layer_.again};
    const auto add = [&](const Passes& o) {
      p.forward += o.forward;
      p.backward += o.backward;
      p.weight += o.weight;
    };
    if (i == 0) add(embedding_);
    if (static_cast<int>(i) + 1 == stages) add(head_);
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
    if (l_.pp > 1)
      t.transfer += message_s() * (run_.overlap_pipeline ? kContention : 1);
    return t;
  }
  double message_s() const {
    const double bytes =
        as_double(s_.B) * as_double(s_.T) / l_.cp * as_double(s_.model.dim) * 2;
    return send_s(m_, l_.tp * l_.cp * l_.dp, bytes / l_.tp);
  }

  // A step of n microbatches; the terms are those of the busiest rank.
  Terms simulate(int64_t n) const {
    JobShape shape = s_;
    shape.microbatches = n * l_.dp;
    const geometry::Schedule schedule = schedule_on(shape, l_);
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
        run_.overlap_pipeline ? message_s() : 0);
    CHECK(timing.ok());
    const auto busiest = static_cast<size_t>(
        std::max_element(timing->busy.begin(), timing->busy.end()) -
        timing->busy.begin());
    Terms t;
    for (const geometry::PipeOp& o : schedule.ranks[busiest])
      t += pass_terms(o.pass,
                      static_cast<size_t>(
                          schedule.stage(static_cast<int>(busiest), o.chunk)),
                      schedule.split_backward);
    t.bubble = timing->makespan - t.total();
    return t;
  }

  // A long schedule repeats itself in its middle, so that its time is linear in
  // the number of microbatches: two short ones give it.
  Terms pipeline() const {
    const int64_t n = most_microbatches(s_, l_);
    const int64_t first = 3 * l_.pp + n % l_.pp, second = first + l_.pp;
    if (n <= second) return simulate(n);
    const Terms a = simulate(first), b = simulate(second);
    const double periods = as_double(n - first) / as_double(l_.pp);
    return a + periods * (b + -1.0 * a);
  }

  Terms after_backward() const {
    const int n = l_.dp * l_.cp, z = shard_group_on(s_, l_);
    const double elements = rank_elements();
    Terms t;
    t.optimizer = kOptimizerBytes * elements / z / m_.memory_bytes_per_s;
    if (n == 1 || sharded_) return t;
    double back = 0, forward = 0;  // of the last and the first microbatch
    for (size_t i = 0; i < stages_.size(); i += static_cast<size_t>(l_.pp)) {
      const Passes& p = stages_[i];
      back += (p.backward + p.weight + p.again).total();
      forward += p.forward.total();
    }
    double gradients = 0, weights = 0;
    if (z == 1) {
      gradients =
          all_reduce_s(m_, data_group(n), elements * run_.gradient_bytes);
    } else {
      gradients = reduce_s(elements);
      weights = gather_weights_s(elements);
    }
    t.data = run_.overlap_data
                 ? exposed(gradients, back) + exposed(weights, forward)
                 : gradients + weights;
    return t;
  }

  const Machine& m_;
  const JobShape& s_;
  const geometry::Layout& l_;
  const Execution& run_;
  const int chunks_;
  double elements_ = 0;  // of a layer on this rank
  Passes layer_, embedding_, head_;
  bool sharded_ = false;
  std::vector<Passes> stages_;
};

}  // namespace

StepCost predict_step(const Machine& m, const JobShape& s,
                      const geometry::Layout& l, const Execution& run) {
  StepCost c;
  c.terms = Step(m, s, l, run).run();
  c.total_s = c.terms.total();
  const double tokens =
      as_double(s.microbatches) * as_double(s.B) * as_double(s.T);
  c.tokens_per_s = tokens / c.total_s / l.world();
  geometry::Layout one;
  const double work =
      as_double(s.model.n_layers) *
          (layer_elements(s, one) + as_double(s.model.dim) * as_double(s.T)) +
      vocabulary_elements(s, one);
  c.mfu = 6 * work * c.tokens_per_s / m.peak_flops;
  return c;
}

}  // namespace remesh::planner
