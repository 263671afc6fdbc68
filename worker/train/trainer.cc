#include "worker/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "parallel/jobfile/lr_schedule.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/rundir/paths.h"
#include "worker/kernels/gemm_rate.h"
#include "worker/train/digest.h"

namespace remesh::train {

Status Trainer::run() {
  log_start("exec_ms");
  RETURN_IF_ERROR(check_spec());
  RETURN_IF_ERROR(start());
  RETURN_IF_ERROR(restore());
  RETURN_IF_ERROR(train());
  checkpointer_.reset();
  if (sweeper_.joinable()) sweeper_.join();
  replication_.reset();
  engine_.reset();
  mesh_.reset();
  world_.reset();
  board_.set_phase(pb::RankStatus::STOPPING);  // waits for others from now on
  mpi_->finalize();
  board_.set_phase(pb::RankStatus::ENDED);
  return ok_status();
}

Status Trainer::train() {
  const auto schedule = jobfile::lr_schedule(job_);
  if (!schedule.ok()) return fail(kExitFailed, schedule.status());
  const int64_t steps = job_.train().steps();
  bool stop = false;
  // All steps are done, but their state has been in memory only.
  if (engine_->step() >= steps &&
      assignment_.source().kind() == pb::Source::MEMORY) {
    (void)replicate_last().ok();
    RETURN_IF_ERROR(save_last(/*last=*/true, /*must=*/false, stop));
  }
  if (!can_train_ && engine_->step() < steps)
    RETURN_IF_ERROR(stop_without_step(stop));
  while (!stop && engine_->step() < steps) {
    const int64_t step = engine_->step() + 1;
    board_.set_step(step);
    log_.set_step(step);
    trace(step);
    RETURN_IF_ERROR(
        one_step(step, jobfile::learning_rate(*schedule, step - 1), stop));
  }
  if (tracer_->on()) trace(std::numeric_limits<int64_t>::max());
  if (trace_job_.busy()) (void)trace_job_.take().ok();
  log_.info("finished",
            {{"reason", engine_->step() >= steps ? "trained to the end"
                                                 : "stopped on request"},
             {"steps", engine_->step()}});
  return ok_status();
}

engine::StepVotes Trainer::votes() const {
  engine::StepVotes f = checkpointer_->votes();
  const uint32_t request = board_.request();
  if ((request & kRequestStop) != 0) {
    f.stop = 1;
    if ((request & kRequestForce) != 0) f.must_stop = 1;
    // State in private memory would be lost without a checkpoint, and so would
    // one whose segment somebody has removed.
    if ((request & kRequestHandoff) == 0 || home_ == nullptr || state_lost_)
      f.stop_saves = 1;
  }
  if (mpi_->rank() == 0)
    f.checkpoint_request = static_cast<double>(board_.checkpoint_request());
  f.gemm_flops_per_s = gemm_flops_per_s_;
  return f;
}

// Traces steps first_step .. first_step + num_steps - 1 of the generation.
// Writes the trace after the last of them or when training ends.
void Trainer::trace(int64_t step) {
  const pb::Profile& p = job_.profile();
  if (!p.enable()) return;
  const int64_t end = first_step_ + p.first_step() + p.num_steps();
  const bool was_on = tracer_->on();
  tracer_->set_on(step >= first_step_ + p.first_step() && step < end);
  if (!was_on || tracer_->on()) return;
  // Training does not wait for the run directory. The tracer is not used again.
  trace_job_.start(
      [this, folder = rundir::traces_path(assignment_.run_dir())]() -> Status {
        Status written = tracer_->write(folder);
        if (!written.ok())
          log_.warn("trace_failed", {{"error", written.to_string()}});
        else
          log_.info("traced",
                    {{"spans", static_cast<int64_t>(tracer_->num_spans())},
                     {"dropped", static_cast<int64_t>(tracer_->dropped())}});
        return written;
      });
}

// Measures after a few steps, so as not to delay the start: a GEMM of this
// rank's part of the gate. More rows do not change the rate, but need memory.
void Trainer::measure_gemms() {
  constexpr int64_t kAfterSteps = 5;
  constexpr int64_t kMostRows = 4096;
  constexpr double kBudgetS = 0.02;
  if (engine_->step() != first_step_ + kAfterSteps) return;
  const pb::Train& t = job_.train();
  const geometry::ModelConfig& c = table_->config();
  const int64_t rows = t.local_batch_size() * t.seq_len() / layout_.cp;
  gemm_flops_per_s_ = measure_gemm_rate(
      *backend_, dtype_, std::min(rows, kMostRows),
      std::max<int64_t>(1, c.hidden_dim / layout_.tp), c.dim, kBudgetS);
}

Status Trainer::one_step(int64_t step, double lr, bool& stop) {
  const pb::Train& t = job_.train();
  const int64_t began_ns = monotonic_ns();
  auto microbatches = [&] {
    const trace::Span span(tracer_.get(), trace::Category::kData);
    return batches_->step(step - 1);
  }();
  if (!microbatches.ok())
    return is_unreadable(microbatches.status().code())
               ? fail(kExitUnreadable, microbatches.status())
               : microbatches.status();
  auto made =
      engine_->run({.lr = lr,
                    .microbatches = *microbatches,
                    .global_tokens = t.global_batch_size() * t.seq_len(),
                    .votes =
                        [this] {
                          before_agreement();
                          return votes();
                        },
                    .accept =
                        [this](double loss, double grad_norm) {
                          return step_policy_.accepts(loss, grad_norm);
                        }});
  // The same step on the same mesh has the same bits: it would diverge again.
  if (made.status().code() == Code::kInvalidArgument)
    return fail(kExitFailed, made.status());
  RETURN_IF_ERROR(made.status());
  if (replication_ != nullptr) RETURN_IF_ERROR(replication_->lasting_failure());
  const engine::StepResult& result = *made;
  if (replication_ != nullptr && replication_->due(step)) replication_->start();
  board::StepRecord record = record_of(step, lr, result, began_ns);
  const engine::StepSeconds& times = result.times;
  board_.set_shares(times.exposed() / record.step_s,
                    times.pipeline / record.step_s);
  if (step == first_step_ + 1) after_first_step();
  const bool due = t.eval_every() > 0 && step % t.eval_every() == 0;
  if (!batches_->validated().empty() && (due || step == t.steps())) {
    RETURN_IF_ERROR(validate(&record));
  }
  if (t.digest()) {
    record.has_digest = true;
    record.digest = digest();
  }
  record.time = unix_seconds();
  // Before the commit: the metrics are on the board, or wait for room there.
  publish(record);
  published_step_ = step;
  update_committed();
  if (step % t.log_every() == 0 && mpi_->rank() == 0) log_step(record, times);
  measure_gemms();
  return boundary(result.agreed, stop);
}

board::StepRecord Trainer::record_of(int64_t step, double lr,
                                     const engine::StepResult& result,
                                     int64_t began_ns) const {
  const pb::Train& t = job_.train();
  const int64_t tokens = t.global_batch_size() * t.seq_len();
  const double step_s = seconds_since(began_ns);
  const double tokens_per_s = static_cast<double>(tokens) / step_s;
  const double flops_per_s = flops_per_token_ * tokens_per_s;
  return {.step = step,
          .loss = result.loss,
          .grad_norm = result.grad_norm,
          .skipped = result.skipped,
          .lr = lr,
          .tokens_per_s = tokens_per_s,
          .step_s = step_s,
          .val_loss = std::numeric_limits<double>::quiet_NaN(),
          .tokens = first_tokens_ + (step - first_step_) * tokens,
          .flops_per_s = flops_per_s,
          .gemm_flops_per_s = result.agreed.gemm_flops_per_s,
          .mfu = t.peak_flops() > 0
                     ? flops_per_s / (t.peak_flops() * mpi_->size())
                     : 0,
          .exposed_comm = result.mean_exposed_s / step_s,
          .bubble = result.mean_bubble_s / step_s};
}

// Reports what the start took and what memory the rank uses.
void Trainer::after_first_step() {
  remove_unused_segments();
  MemoryUse memory = engine_->memory();
  if (replication_ != nullptr) memory.buffers += replication_->bytes();
  board_.set_memory(memory);
  log_start("first_step_ms");
  start_parts_.push_back({"prepare_alone_ms", prepare_ms_});
  start_parts_.push_back({"all_ms", start_at_ms_ - exec_ms_});
  log_.info("started", start_parts_);
}

void Trainer::log_step(const board::StepRecord& record,
                       const engine::StepSeconds& times) {
  log_.info("step", {{"loss", record.loss},
                     {"grad_norm", record.grad_norm},
                     {"skipped", record.skipped},
                     {"lr", record.lr},
                     {"step_s", record.step_s},
                     {"compute_s", times.compute},
                     {"bubble_s", times.pipeline},
                     {"tensor_s", times.tensor},
                     {"context_s", times.context},
                     {"reduce_s", times.reduce},
                     {"gather_s", times.gather},
                     {"agree_s", times.agree},
                     {"update_s", times.update}});
}

Status Trainer::validate(board::StepRecord* record) {
  board_.set_phase(pb::RankStatus::VALIDATE);
  double sum = 0, weights = 0, plain_sum = 0;
  int validated = 0;
  for (const size_t m : batches_->validated()) {
    const data::Member& member = batches_->dataset().members()[m];
    engine::Evaluation evaluated;
    for (int64_t r = 0; r < batches_->validation_rounds(m); ++r) {
      ASSIGN_OR_RETURN(auto microbatches, batches_->validation(m, r));
      ASSIGN_OR_RETURN(const auto part, engine_->evaluate(microbatches));
      evaluated.loss_sum += part.loss_sum;
      evaluated.targets += part.targets;
    }
    // With a loss mask, the windows may have no target.
    const double loss = evaluated.targets > 0
                            ? evaluated.loss_sum / evaluated.targets
                            : std::numeric_limits<double>::quiet_NaN();
    if (batches_->dataset().is_mixture())
      record->val_losses.at(static_cast<size_t>(record->validated++)) = loss;
    if (evaluated.targets <= 0) continue;
    sum += member.weight * loss;
    weights += member.weight;
    plain_sum += loss;
    ++validated;
  }
  if (weights == 0) {  // held-out text is that of weight 0 alone
    sum = plain_sum;
    weights = validated;
  }
  if (weights > 0) record->val_loss = sum / weights;
  return ok_status();
}

// Whether this is the lowest rank of its worker, which performs what each
// worker needs once.
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

// One rank of every worker publishes the metrics of a step, which are the same
// on all ranks, so that they survive the loss of a worker.
void Trainer::publish(const board::StepRecord& record) {
  if (!first_of_worker()) return;
  // Steps must be reported in order and without gaps, so those that do not fit
  // into the ring wait here.
  unpushed_.push_back(record);
  size_t pushed = 0;
  while (pushed < unpushed_.size() && board_.push_step(unpushed_[pushed]))
    ++pushed;
  unpushed_.erase(unpushed_.begin(),
                  unpushed_.begin() + static_cast<std::ptrdiff_t>(pushed));
  if (mpi_->rank() != 0) return;
  checkpointer_->add_metrics(
      board::to_metrics(record, assignment_.generation(), assignment_.mesh()));
}

// Runs before the agreement of a step, after which the update overwrites the
// state of two steps ago.
void Trainer::before_agreement() {
  check_state_kept();
  if (replication_ != nullptr) {
    const Status finished = replication_->finish([this] { board_.tick(); });
    if (!finished.ok())
      log_.warn("replica_failed", {{"error", finished.to_string()}});
    update_committed();
  }
  checkpointer_->before_update(engine_->step() + 1);
}

// A step is finished on this rank when its metrics are published and, if every
// step is replicated, the replicas kept here are complete.
void Trainer::update_committed() {
  int64_t step = published_step_;
  if (replication_ != nullptr && !replication_->lags())
    step = std::min(step, replication_->done_step());
  if (step > committed_step_) board_.commit_step(step);
  committed_step_ = std::max(committed_step_, step);
}

uint64_t Trainer::digest() {
  auto halves =
      to_halves(state_digest(engine_->rank_shard(), engine_->state()));
  world_->all_reduce(std::span<int64_t>(halves), comm::Op::kSum);
  return from_halves(halves);
}

// After the agreement of the first step every rank has the restored state and
// its replicas in its own segments. One rank of each worker removes the others,
// overlapped with compute, since freeing much memory takes long.
void Trainer::remove_unused_segments() {
  if (home_ == nullptr || !first_of_worker()) return;
  sweeper_ = std::thread([this] {
    const int removed = home_->segments().sweep({});
    home_->segments().remove_unfinished();
    if (removed > 0) log_.info("segments_removed", {{"segments", removed}});
  });
}

Status Trainer::boundary(const engine::StepVotes& agreed, bool& stop) {
  const StopPolicy::Answer answer = stop_policy_.on_step(agreed);
  const bool last = engine_->step() >= job_.train().steps();
  const bool stops_here = last || answer != StopPolicy::Answer::kContinue;
  {
    const trace::Span span(tracer_.get(), trace::Category::kCheckpoint);
    checkpointer_->on_step(agreed, stops_here, rank_state());
  }
  if (!stops_here) return ok_status();
  const Status replicated = replicate_last();
  if (!last && !stop_policy_.saves()) {
    RETURN_IF_ERROR(replicated);
    checkpointer_->abandon_for_handoff();
    stop = true;
    return ok_status();
  }
  return save_last(last, answer == StopPolicy::Answer::kMustStop, stop);
}

// What the agreement of a step decides, in a rescue that can make none: a stop
// that one worker is asked for stops the ranks of all.
Status Trainer::stop_without_step(bool& stop) {
  std::array<int64_t, 2> agreed = {};  // to stop, to save
  while (agreed[0] == 0) {
    board_.tick();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const engine::StepVotes mine = votes();
    agreed = {mine.stop > 0 ? 1 : 0, mine.stop_saves > 0 ? 1 : 0};
    world_->all_reduce(std::span<int64_t>(agreed), comm::Op::kMax);
  }
  Status replicated = replicate_last();
  if (agreed[1] > 0) return save_last(/*last=*/false, /*must=*/true, stop);
  checkpointer_->abandon_for_handoff();
  stop = true;
  return replicated;
}

// Training continues, but a failure now loses the steps since the last
// checkpoint.
void Trainer::check_state_kept() {
  if (home_ == nullptr || state_lost_) return;
  const Status kept = home_->segment().check_kept();
  if (kept.ok()) return;
  state_lost_ = true;
  log_.error("state_not_kept", {{"error", kept.to_string()}});
  checkpointer_->set_lasting_error(kept);
}

// Completes the replicas of the last state before this rank stops. If it saves
// that state, a failure costs nothing.
Status Trainer::replicate_last() {
  if (replication_ == nullptr) return ok_status();
  Status finished = replication_->finish_newest([this] { board_.tick(); });
  if (!finished.ok())
    log_.warn("replica_failed", {{"error", finished.to_string()}});
  update_committed();
  return finished;
}

// Tries a few times, in case there is room again in a moment.
Status Trainer::save_last(bool last, bool must, bool& stop) {
  constexpr int kTries = 3;
  constexpr int64_t kPauseMs = 1000;
  Status saved = checkpointer_->save_and_wait(rank_state());
  for (int tries = 1; !saved.ok() && tries < kTries; ++tries) {
    log_.warn("save_tried_again", {{"error", saved.to_string()}});
    for (const int64_t end = monotonic_ms() + kPauseMs; monotonic_ms() < end;) {
      board_.tick();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    saved = checkpointer_->save_and_wait(rank_state());
  }
  if (saved.ok()) {
    stop = true;
    return ok_status();
  }
  saved = saved.with_context(
      fmt::format("step {} could not be saved", engine_->step()));
  if (last || must) return fail(kExitSaveFailed, std::move(saved));
  stop_policy_.declined();
  board_.set_checkpoint_error(saved);
  board_.decline_stop();
  log_.warn("stop_declined", {{"reason", saved.to_string()}});
  return ok_status();
}

}  // namespace remesh::train
