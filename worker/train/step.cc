#include "worker/train/step.h"

#include <fmt/format.h>

#include <cmath>

#include "proto/base/clock.h"
#include "worker/train/schedule.h"
#include "worker/train/share.h"

namespace remesh::train {
namespace {

double seconds_since(int64_t ns) {
  return static_cast<double>(monotonic_ns() - ns) * 1e-9;
}

}  // namespace

Step::Step(const geometry::ShardTable& shard, model::Stage& stage,
           kernels::Backend& backend, comm::Comm& dp, comm::Comm& world,
           const StepOptions& options, Progress progress)
    : shard_(shard),
      table_(shard.table()),
      stage_(stage),
      backend_(backend),
      dp_(dp),
      world_(world),
      options_(options),
      progress_(progress),
      reducer_(shard.table(), options.bucket_elements, dp) {}

void Step::compute(const StepInput& in, TrainState& state, Facts& facts) {
  progress_.phase(board::Phase::kCompute);
  const std::span<float> grads = state.grads.span();
  // Memory is made zero, and the first step need not touch it again.
  if (state.grads_used) backend_.zero(grads.data(), grads.size_bytes());
  state.grads_used = true;
  reducer_.begin(grads);
  const double scale = 1.0 / static_cast<double>(in.global_tokens);
  const size_t n = in.microbatches.size();
  model::ResidentHooks hooks(shard_, grads);
  model::ResidentHooks last(shard_, grads, [this](int u) { reduce_unit(u); });
  for (size_t i = 0; i < n; ++i) {
    progress_.microbatch(static_cast<int64_t>(i));
    const model::MicroBatch& mb = in.microbatches[i];
    facts.loss_sum += stage_.forward(0, mb, nullptr, hooks);
    facts.tokens += static_cast<double>(mb.B * mb.T);
    stage_.backward(0, scale, nullptr, i + 1 == n ? last : hooks);
  }
  progress_.microbatch(static_cast<int64_t>(n));
  reducer_.all_ready();
}

void Step::reduce_unit(int unit) {
  const geometry::Unit& u = shard_.units()[static_cast<size_t>(unit)];
  for (size_t p = u.last; p-- > u.first;) reducer_.ready(shard_[p].param);
}

Result<StepResult> Step::run(const StepInput& in, TrainState& state) {
  StepResult result;
  Facts facts;
  int64_t at = monotonic_ns();
  compute(in, state, facts);
  result.compute_s = seconds_since(at);

  at = monotonic_ns();
  progress_.phase(board::Phase::kReduce);
  reducer_.finish([this] { progress_.tick(); });
  // Every replica holds the whole sum now: each adds up a share of its squares.
  const Share share = share_of(table_.num_elements(), dp_.size(), dp_.rank());
  facts.square_sum =
      backend_.sum_of_squares(share.size(), state.grads.data() + share.begin);
  if (in.facts) {
    Facts more = in.facts();
    more.loss_sum = facts.loss_sum;
    more.tokens = facts.tokens;
    more.square_sum = facts.square_sum;
    facts = more;
  }
  auto sums = facts.to_array();
  progress_.tick();
  world_.all_reduce(std::span<double>(sums), comm::Op::kSum);
  progress_.tick();
  result.agreed = Facts::from_array(sums);
  result.loss = result.agreed.loss_sum / static_cast<double>(in.global_tokens);
  result.grad_norm = std::sqrt(result.agreed.square_sum);
  result.reduce_s = seconds_since(at);
  CHECK_MSG(static_cast<int64_t>(result.agreed.tokens) == in.global_tokens,
            "the ranks' microbatches are not the global batch");
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm))
    return internal(fmt::format(
        "step {}: loss {}, gradient norm {}: not finite; the update was not "
        "made",
        state.step + 1, result.loss, result.grad_norm));

  at = monotonic_ns();
  progress_.phase(board::Phase::kUpdate);
  update(in.lr, clip_coefficient(options_.max_norm, result.grad_norm), state);
  result.update_s = seconds_since(at);
  return result;
}

void Step::update(double lr, double grad_scale, TrainState& state) {
  kernels::AdamWOptions o{.lr = lr,
                          .beta1 = options_.beta1,
                          .beta2 = options_.beta2,
                          .eps = options_.eps,
                          .step = state.step + 1,
                          .grad_scale = grad_scale};
  for (size_t i = 0; i < table_.size(); ++i) {
    o.weight_decay = table_[i].decay ? options_.weight_decay : 0;
    const int64_t at = table_.offset(i);
    float* p = state.weights.data() + at;
    float* m = state.exp_avg.data() + at;
    float* v = state.exp_avg_sq.data() + at;
    backend_.adamw(o, table_[i].numel(), state.grads.data() + at, p, m, v, p, m,
                   v);
    progress_.tick();
  }
  stage_.load_weights(state.weights.span());
  ++state.step;
}

}  // namespace remesh::train
