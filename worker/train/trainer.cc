#include "worker/train/trainer.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "proto/base/clock.h"
#include "worker/train/digest.h"
#include "worker/train/gemm_rate.h"
#include "worker/train/schedule.h"

namespace remesh::train {
namespace {

using board::Phase;

Schedule schedule_of(const pb::Job& job, Decay decay) {
  const pb::Schedule& s = job.schedule();
  return {.lr = job.optimizer().lr(),
          .warmup_steps = s.warmup_steps(),
          .total_steps =
              s.total_steps() > 0 ? s.total_steps() : job.train().steps(),
          .decay = decay,
          .decay_ratio = s.decay_ratio(),
          .min_lr_factor = s.min_lr_factor()};
}

}  // namespace

Outcome Trainer::run() {
  log_start("exec_ms");
  using Part = Outcome (Trainer::*)();
  for (const Part part : {&Trainer::check_spec, &Trainer::start,
                          &Trainer::restore, &Trainer::train}) {
    if (Outcome o = (this->*part)()) return o;
  }
  board_.set_phase(Phase::kStopping);
  checkpointer_.reset();
  if (sweeper_.joinable()) sweeper_.join();
  replication_.reset();
  engine_.reset();
  mesh_.reset();
  world_.reset();
  mpi_->finalize();
  board_.set_phase(Phase::kEnded);
  return {};
}

Outcome Trainer::train() {
  const int64_t steps = job_.train().steps();
  bool stop = false;
  // All steps are made, but their state was in memory alone until now.
  if (engine_->step() >= steps &&
      assignment_.source().kind() == pb::Source::MEMORY) {
    if (Outcome o = replicate_last()) return o;
    if (Outcome o = save_last(/*last=*/true, /*must=*/false, stop)) return o;
  }
  while (!stop && engine_->step() < steps) {
    const int64_t step = engine_->step() + 1;
    board_.set_step(step);
    log_.set_step(step);
    trace(step);
    if (Outcome o = one_step(step, stop)) return o;
  }
  if (tracer_->on()) trace(std::numeric_limits<int64_t>::max());
  log_.info("finished",
            {{"reason", engine_->step() >= steps ? "trained to the end"
                                                 : "stopped as asked"},
             {"steps", engine_->step()}});
  return {};
}

engine::Facts Trainer::facts() const {
  engine::Facts f = checkpointer_->facts();
  const uint32_t request = board_.request();
  if ((request & board::kRequestStop) != 0) {
    f.stop = 1;
    if ((request & board::kRequestMust) != 0) f.must_stop = 1;
    // What lives in this process alone cannot be handed over.
    if ((request & board::kRequestHandOver) == 0 || home_ == nullptr)
      f.stop_saves = 1;
  }
  if (mpi_->rank() == 0)
    f.checkpoint_request = static_cast<double>(board_.checkpoint_request());
  f.gemm_flops_per_s = gemm_flops_per_s_;
  return f;
}

// Traces steps first_step .. first_step + num_steps - 1 of the generation, and
// writes what there is when they are over or training ends before.
void Trainer::trace(int64_t step) {
  const pb::Profile& p = job_.profile();
  if (!p.enable()) return;
  const int64_t end = first_step_ + p.first_step() + p.num_steps();
  const bool was_on = tracer_->on();
  tracer_->set_on(step >= first_step_ + p.first_step() && step < end);
  if (!was_on || tracer_->on()) return;
  const Status written = tracer_->write(assignment_.run_dir() + "/traces");
  if (!written.ok())
    log_.warn("trace_failed", {{"error", written.to_string()}});
  else
    log_.info("traced",
              {{"spans", static_cast<int64_t>(tracer_->num_spans())},
               {"dropped", static_cast<int64_t>(tracer_->dropped())}});
}

// After a few steps, so that a start is not held up by it.
void Trainer::measure_gemms() {
  constexpr int64_t kAfterSteps = 5;
  constexpr double kBudgetS = 0.02;
  if (engine_->step() != first_step_ + kAfterSteps) return;
  const pb::Train& t = job_.train();
  const geometry::ModelConfig& c = table_->config();
  gemm_flops_per_s_ = measure_gemm_rate(*backend_, engine_->dtype(),
                                        t.local_batch_size() * t.seq_len(),
                                        c.hidden_dim, c.dim, kBudgetS);
}

Outcome Trainer::one_step(int64_t step, bool& stop) {
  const pb::Train& t = job_.train();
  const int64_t began_ns = monotonic_ns();
  const auto decay = parse_decay(job_.schedule().decay_type());
  if (!decay.ok())
    return Failure{board::kExitCannotContinue, decay.status().to_string()};
  const double lr = learning_rate(schedule_of(job_, *decay), step - 1);
  auto microbatches = [&] {
    const trace::Span span(tracer_.get(), trace::Category::kData);
    return batches_->step(step - 1);
  }();
  if (!microbatches.ok())
    return Failure{board::kExitInternal, microbatches.status().to_string()};
  const int64_t tokens = t.global_batch_size() * t.seq_len();
  auto r = engine_->run({.lr = lr,
                         .microbatches = *microbatches,
                         .global_tokens = tokens,
                         .facts = [this] {
                           before_agreement();
                           return facts();
                         }});
  // A flipped bit in hardware makes a NaN as well as a bad job does: ending
  // with "try again" lets the coordinator find out which.
  if (!r.ok()) return Failure{board::kExitInternal, r.status().to_string()};
  if (replication_ != nullptr && replication_->due(step)) replication_->start();
  if (step == first_step_ + 1) remove_unused_segments();
  const double step_s = static_cast<double>(monotonic_ns() - began_ns) * 1e-9;
  board::StepRecord record{
      .step = step,
      .loss = r->loss,
      .grad_norm = r->grad_norm,
      .lr = lr,
      .tokens_per_s = static_cast<double>(tokens) / step_s,
      .step_s = step_s,
      .val_loss = std::numeric_limits<double>::quiet_NaN(),
      .tokens = first_tokens_ + (step - first_step_) * tokens,
      .flops_per_s = geometry::flops_per_token(table_->config(), t.seq_len()) *
                     static_cast<double>(tokens) / step_s,
      .gemm_flops_per_s = r->agreed.gemm_flops_per_s,
      .exposed_comm = r->mean_exposed_s / step_s,
      .bubble = r->mean_bubble_s / step_s};
  const engine::StepTimes& times = r->times;
  board_.set_shares(times.exposed() / step_s, times.pipeline / step_s);
  if (step == first_step_ + 1) {
    board::Memory memory = engine_->memory();
    if (replication_ != nullptr) memory.buffers += replication_->bytes();
    board_.set_memory(memory);
    log_start("first_step_ms");
    start_parts_.push_back({"prepare_alone_ms", prepare_ms_});
    start_parts_.push_back({"all_ms", start_at_ms_ - exec_ms_});
    log_.info("started", start_parts_);
  }
  const bool due = t.eval_every() > 0 && step % t.eval_every() == 0;
  if (batches_->eval_sequences() > 0 && (due || step == t.steps()))
    if (Outcome o = validate(record.val_loss)) return o;
  if (t.digest()) {
    record.has_digest = true;
    record.digest = digest();
  }
  record.time = unix_seconds();
  // Whoever hears that the step is finished has its metrics.
  publish(record);
  told_step_ = step;
  tell_committed();
  if (step % t.log_every() == 0 && mpi_->rank() == 0)
    log_.info("step", {{"loss", record.loss},
                       {"grad_norm", record.grad_norm},
                       {"lr", lr},
                       {"step_s", step_s},
                       {"compute_s", times.compute},
                       {"bubble_s", times.pipeline},
                       {"tensor_s", times.tensor},
                       {"context_s", times.context},
                       {"reduce_s", times.reduce},
                       {"gather_s", times.gather},
                       {"agree_s", times.agree},
                       {"update_s", times.update}});
  measure_gemms();
  return boundary(r->agreed, stop);
}

Outcome Trainer::validate(double& loss) {
  board_.set_phase(Phase::kValidate);
  auto microbatches = batches_->validation();
  if (!microbatches.ok())
    return Failure{board::kExitInternal, microbatches.status().to_string()};
  const auto e = engine_->evaluate(*microbatches);
  if (!e.ok()) return Failure{board::kExitInternal, e.status().to_string()};
  loss = e->loss_sum / e->tokens;
  return {};
}

// What a worker needs to have done once, its lowest rank does.
bool Trainer::first_of_worker() const {
  const auto& ranks = assignment_.ranks();
  const auto mine = std::find_if(
      ranks.begin(), ranks.end(),
      [&](const pb::RankPlace& p) { return p.rank() == mpi_->rank(); });
  if (mine == ranks.end()) return mpi_->rank() == 0;
  return std::none_of(ranks.begin(), ranks.end(), [&](const auto& p) {
    return p.worker() == mine->worker() && p.rank() < mine->rank();
  });
}

// Every worker's daemon is told: the numbers of a step are the same on all
// ranks, and shall outlive a worker that is lost.
void Trainer::publish(const board::StepRecord& record) {
  if (!first_of_worker()) return;
  // Steps enter the world in order, and none is left out: what the daemon has
  // no room for yet waits here.
  unpushed_.push_back(record);
  size_t pushed = 0;
  while (pushed < unpushed_.size() && board_.push_step(unpushed_[pushed]))
    ++pushed;
  unpushed_.erase(unpushed_.begin(),
                  unpushed_.begin() + static_cast<std::ptrdiff_t>(pushed));
  if (mpi_->rank() != 0) return;
  pb::StepMetrics m;
  m.set_step(record.step);
  m.set_loss(record.loss);
  m.set_grad_norm(record.grad_norm);
  m.set_lr(record.lr);
  m.set_tokens(record.tokens);
  m.set_tokens_per_s(record.tokens_per_s);
  m.set_step_s(record.step_s);
  m.set_generation(assignment_.generation());
  *m.mutable_mesh() = assignment_.mesh();
  m.set_time(record.time);
  m.set_flops_per_s(record.flops_per_s);
  if (record.gemm_flops_per_s > 0)
    m.set_gemm_flops_per_s(record.gemm_flops_per_s);
  m.set_exposed_comm(record.exposed_comm);
  m.set_bubble(record.bubble);
  if (!std::isnan(record.val_loss)) m.set_val_loss(record.val_loss);
  if (record.has_digest) m.set_digest(record.digest);
  checkpointer_->add_metrics(m);
}

// The agreement of a step is the last moment before its update overwrites the
// state of two steps ago.
void Trainer::before_agreement() {
  if (replication_ != nullptr) {
    const Status whole = replication_->finish([this] { board_.tick(); });
    if (!whole.ok())
      log_.warn("replica_failed", {{"error", whole.to_string()}});
    tell_committed();
  }
  checkpointer_->before_update(engine_->step() + 1);
}

void Trainer::poll_replica() {
  if (!replication_->done() && replication_->poll()) tell_committed();
}

// A step is finished on this rank when its metrics are on the board and, where
// each step has replicas, those that it keeps are whole.
void Trainer::tell_committed() {
  int64_t step = told_step_;
  if (replication_ != nullptr && !replication_->lags())
    step = std::min(step, replication_->done_step());
  if (step > committed_step_) board_.commit_step(step);
  committed_step_ = std::max(committed_step_, step);
}

uint64_t Trainer::digest() {
  const engine::ConstStateView s = engine_->state();
  auto halves =
      to_halves(state_digest(*table_, engine_->shard(), engine_->zero(),
                             s.weights, s.exp_avg, s.exp_avg_sq));
  world_->all_reduce(std::span<int64_t>(halves), comm::Op::kSum);
  return from_halves(halves);
}

// Once the first step was agreed on: every rank has the restored state, and
// its replicas, in segments of its own. One rank of each worker removes the
// others, beside the computing, for it may be much memory to give back.
void Trainer::remove_unused_segments() {
  if (home_ == nullptr) return;
  if (!first_of_worker()) return;
  sweeper_ = std::thread([this] {
    const int removed = home_->segments().sweep({});
    home_->segments().remove_unfinished();
    if (removed > 0) log_.info("segments_removed", {{"number", removed}});
  });
}

Outcome Trainer::boundary(const engine::Facts& agreed, bool& stop) {
  const StopPolicy::Answer answer = stop_policy_.on_step(agreed);
  const bool last = engine_->step() >= job_.train().steps();
  const bool stops_here = last || answer != StopPolicy::Answer::kGoOn;
  {
    const trace::Span span(tracer_.get(), trace::Category::kCheckpoint);
    checkpointer_->on_step(agreed, stops_here, rank_state());
  }
  if (!stops_here) return {};
  if (Outcome o = replicate_last()) return o;
  if (!last && !stop_policy_.saves()) {
    checkpointer_->abandon_for_hand_over();
    stop = true;
    return {};
  }
  return save_last(last, answer == StopPolicy::Answer::kMustStop, stop);
}

// Whatever follows, the state that is left behind has its replicas.
Outcome Trainer::replicate_last() {
  if (replication_ == nullptr) return {};
  if (!replication_->due(engine_->step())) replication_->start();
  const Status whole = replication_->finish([this] { board_.tick(); });
  if (!whole.ok()) return Failure{board::kExitInternal, whole.to_string()};
  tell_committed();
  return {};
}

Outcome Trainer::save_last(bool last, bool must, bool& stop) {
  const Status saved = checkpointer_->save_and_wait(rank_state());
  if (saved.ok()) {
    stop = true;
    return {};
  }
  const std::string why = fmt::format("step {} could not be saved: {}",
                                      engine_->step(), saved.to_string());
  if (last || must) return Failure{board::kExitSaveFailed, why};
  stop_policy_.refused();
  board_.refuse_stop();
  board_.set_checkpoint_error(why);
  log_.warn("stop_refused", {{"reason", why}});
  return {};
}

}  // namespace remesh::train
