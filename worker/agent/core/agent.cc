#include "worker/agent/core/agent.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/check.h"
#include "proto/base/exit_code.h"
#include "proto/base/rank_request.h"
#include "proto/limits/plausible.h"

namespace remesh::agent {
namespace {

constexpr int64_t kFenceResendMs = 200;
constexpr int64_t kReportGapMs = 5;  // between reports that are not urgent
constexpr int64_t kSameInterruptMs = 1000;  // sent to a process and its group
constexpr int64_t kAbandonedMs = 60'000;
constexpr int64_t kPausedMs = 5'000;  // between two ticks
constexpr size_t kMaxMetrics = 100'000;

bool is_stopping(const pb::RankStatus& s) {
  return s.phase() == pb::RankStatus::STOPPING ||
         s.phase() == pb::RankStatus::ENDED;
}

bool failed(const pb::RankStatus& s) {
  return s.exited() && !s.killed_by_worker() &&
         (s.signal() != 0 || s.exit_code() != 0);
}

}  // namespace

std::vector<Action> Agent::on(const Event& event, int64_t now_ms) {
  actions_.clear();
  if (exited_) return {};
  now_ms_ = now_ms;
  std::visit([this](const auto& e) { handle(e); }, event);
  reconcile();
  take_inventory();
  if (!exited_ &&
      (urgent_ || (dirty_ && now_ms_ - reported_ms_ >= kReportGapMs) ||
       reported_ms_ < 0 || now_ms_ - reported_ms_ >= report_every_ms_))
    report();
  return std::move(actions_);
}

// ---------------------------------------------------------------- handlers

void Agent::handle(const Tick& e) {
  state_room_ = e.state_room;
  for (const RankSample& s : e.samples) absorb(s);
  const bool fences_open =
      busy_ && std::any_of(fences_.begin(), fences_.end(), [this](auto& f) {
        return !fence_done_.contains(f.first);
      });
  if (fences_open && now_ms_ - fence_sent_ms_ >= kFenceResendMs)
    send_fences(/*all=*/false);
  // The host was paused: nobody could be heard meanwhile.
  if (const int64_t gap = now_ms_ - ticked_ms_;
      ticked_ms_ >= 0 && gap > std::max(kPausedMs, 3 * report_every_ms_)) {
    if (directive_ms_ >= 0)
      directive_ms_ = std::min(now_ms_, directive_ms_ + gap);
    progress_ms_ = std::min(now_ms_, progress_ms_ + gap);
  }
  ticked_ms_ = now_ms_;
  if (leaving_) leave_without_coordinator();
  // The job ended while the coordinator was unreachable, or this worker is cut
  // off from it and from the other ranks.
  if (busy_ && now_ms_ - directive_ms_ > kAbandonedMs &&
      now_ms_ - progress_ms_ > kAbandonedMs) {
    act(LogEvent{"abandoned",
                 "no coordinator and no progress: killing the ranks"});
    kill_ranks();
  }
}

// The worker must be able to leave without a coordinator: the stop request
// reaches every rank of the generation through the collective of the step.
void Agent::leave_without_coordinator() {
  const int64_t heard = std::max(directive_ms_, leaving_ms_);
  const bool never = directive_ms_ < 0;
  if (!never && now_ms_ - heard < 3 * dead_after_ms_) return;
  if (busy_) {
    stops_alone_ = true;
    push_request();
    // The ranks have saved. MPI_Finalize needs a fence, which only a
    // coordinator could relay.
    const bool saved =
        std::all_of(ranks_.begin(), ranks_.end(), [](const auto& r) {
          return r.second.exited() || is_stopping(r.second);
        });
    if (saved) kill_ranks();
    return;
  }
  // Without a checkpoint, a returning coordinator and a new worker of this name
  // may need the states.
  exit_with(leave_exit_.first, leave_exit_.second,
            saved_alone_ ? States::kRemoved : States::kKept);
}

// Whether every rank has written its checkpoint; only MPI_Finalize follows.
bool Agent::all_saved() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& r) {
    const pb::RankStatus& s = r.second;
    return is_stopping(s) ||
           (s.exited() && s.exit_code() == 0 && s.signal() == 0);
  });
}

bool Agent::is_mine(const pb::Directive& d) const {
  return d.worker() == about_.worker() &&
         d.incarnation() == about_.incarnation();
}

void Agent::handle(const DirectiveReceived& e) {
  const pb::Directive& d = e.directive;
  const bool old = d.epoch() < epoch_ ||
                   (d.epoch() == epoch_ && d.seq() <= directive_seq_) ||
                   d.generation() < generation_;
  if (!is_mine(d) || old || !limits::check(d).ok()) return;
  const bool new_coordinator = d.epoch() > epoch_ && epoch_ != 0;
  epoch_ = d.epoch();
  directive_seq_ = d.seq();
  directive_ms_ = now_ms_;
  directive_ = d;
  if (d.report_every_ms() > 0) report_every_ms_ = d.report_every_ms();
  if (d.dead_after_ms() > 0) dead_after_ms_ = d.dead_after_ms();
  if (d.state_job() != state_job_) {
    state_job_ = d.state_job();
    asked_ = TakeInventory{};
    inventory_.reset();
  }
  // Those of older generations are kept until then, too: the coordinator
  // records them only once a state that includes their steps is restored, and
  // may have been killed before.
  metrics_acked_ = std::max(metrics_acked_, d.metrics_acked());
  std::erase_if(metrics_,
                [&](const auto& m) { return m.step() <= metrics_acked_; });
  std::erase_if(origins_,
                [&](const auto& o) { return o.step() <= metrics_acked_; });
  // Also after its own ranks have ended: those of others may wait.
  if (d.want_fences() && d.generation() == ranks_generation_)
    send_fences(/*all=*/true);
  if (new_coordinator) {
    urgent_ = true;
    // It counts requests from 0: what was asked of it so far is new.
    request_base_ = busy_ ? -sent_request_.checkpoint_request : 0;
  }
  if (d.want_hardware() && !hardware_ && !measuring_) {
    measuring_ = true;
    act(MeasureHardware{});
  }
}

void Agent::handle(const HardwareMeasured& e) {
  measuring_ = false;
  hardware_ = e;
  urgent_ = true;
}

void Agent::handle(const FenceOutReceived& e) {
  const pb::FenceOut& f = e.fence;
  if (!busy_ || f.generation() != ranks_generation_ ||
      !fences_.contains(f.index()) || fence_done_.contains(f.index()))
    return;
  fence_done_[f.index()] = true;
  act(CompleteFence{f.generation(), f.index(), f.blob()});
}

void Agent::handle(const LocalFence& e) {
  if (!busy_ || e.generation != ranks_generation_) return;
  fences_[e.index] = e.blob;
  send_fences(/*all=*/false);
}

void Agent::handle(const RankStarted& e) {
  if (e.generation != ranks_generation_) return;
  ranks_[e.rank].set_pid(e.pid);
  dirty_ = true;
}

void Agent::handle(const SpawnFailed& e) {
  if (!busy_ || e.generation != ranks_generation_) return;
  for (auto& [rank, s] : ranks_) {
    if (s.exited() || (s.pid() != 0 && rank != e.rank)) continue;
    // It never started, so there is nothing to reap.
    s.set_exited(true);
    if (rank == e.rank || e.rank < 0) {
      s.set_exit_code(e.permanent ? kExitFailed : kExitInternal);
      s.set_error(e.error);
    } else {
      s.set_killed_by_worker(true);
    }
  }
  urgent_ = true;
  kill_ranks();
  settle();
}

void Agent::handle(const RankExited& e) {
  if (!busy_ || e.generation != ranks_generation_) return;
  absorb(e.sample);
  pb::RankStatus& s = ranks_[e.rank];
  s.set_exited(true);
  s.set_exit_code(e.exit_code);
  s.set_signal(e.signal);
  s.set_exit_time(e.exit_time);
  s.set_last_log(e.last_log);
  if (killing_ && e.signal == 9) s.set_killed_by_worker(true);
  urgent_ = true;
  // The peers of a dead rank would hang forever: kill all local ranks at once.
  if (failed(s)) kill_ranks();
  settle();
}

void Agent::handle(const TornDown& e) {
  if (!busy_ || e.generation != ranks_generation_) return;
  busy_ = false;
  tearing_down_ = false;
  killing_ = false;
  saved_alone_ = stops_alone_ && !handoff_requested_ && all_saved();
  if (ranks_generation_ == generation_) set_state(pb::Report::QUIESCED);
  urgent_ = true;
}

void Agent::handle(const InventoryTaken& e) {
  if (e.job != asked_.job || e.generation != asked_.generation) return;
  // Outdated if ranks have been started in the meantime.
  if (e.job != state_job_ || e.generation != ranks_generation_) return;
  inventory_ = e;
  if (!busy_) urgent_ = true;
}

void Agent::handle(const Refused& e) {
  if (e.kind != pb::Refusal::OTHER_JOB && e.kind != pb::Refusal::PERMANENT)
    return;
  if (directive_ms_ < 0) return exit_with(kExitFailed, e.reason, States::kKept);
  if (e.kind == pb::Refusal::OTHER_JOB || leaving_) return;
  leave_exit_ = {kExitFailed, e.reason};
  leave();
}

void Agent::handle(const RunEnded& e) {
  // A worker that the end of the job did not reach.
  if (busy_) return kill_ranks();
  exit_with(kExitEnded, e.reason,
            e.done ? States::kRemovedForAll : States::kKept);
}

void Agent::handle(const Terminate&) {
  if (interrupted_ms_ < 0) {
    interrupted_ms_ = now_ms_;
    return leave();
  }
  if (now_ms_ - interrupted_ms_ < kSameInterruptMs) return;
  if (busy_) kill_ranks();
  exit_with(kExitInterrupted, "interrupted twice: left immediately",
            States::kKept);
}

void Agent::leave() {
  if (leaving_) return;
  leaving_ = true;
  leaving_ms_ = now_ms_;
  urgent_ = true;
  act(LogEvent{"leaving", "stop requested: leaving after the current step"});
  if (directive_ms_ < 0 && !busy_)
    exit_with(0, "left; never had a job", States::kKept);
}

// ---------------------------------------------------------------- decisions

void Agent::reconcile() {
  if (exited_ || !directive_) return;
  const pb::Directive& d = *directive_;
  if (d.goal() == pb::Directive::UNKNOWN) return;
  if (d.generation() > generation_) fence_at(d.generation());
  if (d.goal() == pb::Directive::LEAVE || d.goal() == pb::Directive::SHUTDOWN) {
    if (busy_) {
      kill_ranks();
      return;
    }
    if (d.goal() == pb::Directive::LEAVE)
      exit_with(0, "left", d.keep_states() ? States::kKept : States::kRemoved);
    else
      exit_with(0, "job ended",
                d.keep_states() ? States::kKept : States::kRemovedForAll);
    return;
  }
  if (busy_ && ranks_generation_ < generation_) {
    kill_ranks();
    return;
  }
  switch (d.goal()) {
    case pb::Directive::IDLE:
      if (busy_) {
        kill_ranks();
      } else if (state_ != pb::Report::IDLE) {
        ranks_.clear();
        set_state(pb::Report::IDLE);
      }
      break;
    case pb::Directive::PREPARE:
      if (state_ == pb::Report::IDLE && ran_generation_ < generation_) {
        assignment_ = d.assignment();
        request_base_ = d.checkpoint_request();
        set_state(pb::Report::PREPARED);
      }
      break;
    case pb::Directive::RUN:
      if (state_ == pb::Report::PREPARED) start_ranks();
      push_request();
      break;
    case pb::Directive::FINISH:
      push_request();
      break;
    case pb::Directive::ABORT:
      if (busy_) {
        kill_ranks();
      } else if (state_ != pb::Report::QUIESCED) {
        ran_generation_ = generation_;
        set_state(pb::Report::QUIESCED);
      }
      break;
    default:
      break;
  }
}

void Agent::fence_at(int64_t generation) {
  generation_ = generation;
  assignment_.reset();
  if (!busy_) ranks_.clear();
  set_state(pb::Report::IDLE);
  // Report even if the state was IDLE before: the coordinator waits for it.
  urgent_ = true;
  stops_alone_ = false;
}

// The source of the generation, if it is in memory and its steps are not in the
// metrics log yet.
void Agent::note_origin() {
  const pb::Source& source = assignment_->source();
  if (source.states().empty() || source.step() <= metrics_acked_) return;
  pb::Branches::Origin& o = origins_.emplace_back();
  o.set_generation(generation_);
  o.set_from(source.states(0).generation());
  o.set_step(source.step());
  if (origins_.size() > limits::kMaxOrigins) origins_.pop_front();
}

void Agent::start_ranks() {
  CHECK(!busy_ && ran_generation_ < generation_ && assignment_);
  ran_generation_ = generation_;
  ranks_generation_ = generation_;
  note_origin();
  ranks_.clear();
  fences_.clear();
  fence_done_.clear();
  for (const pb::RankPlace& p : assignment_->ranks()) {
    if (p.worker() != about_.worker()) continue;
    pb::RankStatus s;
    s.set_rank(p.rank());
    s.set_phase(pb::RankStatus::STARTING);
    s.set_committed_step(-1);
    s.set_checkpoint_step(-1);
    ranks_[p.rank()] = s;
  }
  stops_alone_ = false;
  if (ranks_.empty()) {
    set_state(pb::Report::QUIESCED);  // trivially: it has no ranks
    return;
  }
  busy_ = true;
  killing_ = tearing_down_ = false;
  progress_ms_ = now_ms_;
  inventory_.reset();
  handoff_requested_ = false;
  saved_alone_ = false;
  set_state(pb::Report::RUNNING);
  act(Spawn{*assignment_, state_job_});
}

void Agent::kill_ranks() {
  if (!busy_ || killing_) return;
  killing_ = true;
  if (any_alive()) act(KillRanks{ranks_generation_});
  settle();
}

void Agent::settle() {
  if (!busy_ || tearing_down_ || any_alive()) return;
  tearing_down_ = true;
  take_inventory();  // first, so that the QUIESCED report includes it
  act(TearDown{ranks_generation_});
}

// Takes one inventory per job and per generation that has ended here.
void Agent::take_inventory() {
  if (exited_ || state_job_ == 0 || (busy_ && !tearing_down_)) return;
  if (asked_.job == state_job_ && asked_.generation == ranks_generation_)
    return;
  asked_ = {state_job_, ranks_generation_};
  act(asked_);
}

bool Agent::any_alive() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& r) { return !r.second.exited(); });
}

void Agent::absorb(const RankSample& sample) {
  const auto it = ranks_.find(sample.status.rank());
  if (!busy_ || it == ranks_.end() || it->second.exited()) return;
  pb::RankStatus& s = it->second;
  const int64_t committed = s.committed_step();
  if (s.progress() != sample.status.progress()) progress_ms_ = now_ms_;
  const int pid = s.pid();
  s = sample.status;
  if (!s.has_pid()) s.set_pid(pid);
  if (s.committed_step() != committed) dirty_ = true;
  for (const pb::StepMetrics& m : sample.steps) {
    if (m.step() <= metrics_acked_) continue;
    metrics_.push_back(m);
    if (metrics_.size() > kMaxMetrics) metrics_.pop_front();
    dirty_ = true;
  }
}

// Sends the requests for the ranks' boards to the shell when they change.
void Agent::push_request() {
  SetRequest wanted;
  if (directive_ && ranks_generation_ == directive_->generation()) {
    if (directive_->goal() == pb::Directive::FINISH)
      wanted.bits = kRequestStop | (directive_->save() ? 0 : kRequestHandoff);
    wanted.checkpoint_request =
        directive_->checkpoint_request() - request_base_;
  }
  if (stops_alone_) wanted.bits = kRequestStop | kRequestForce;
  if (!busy_) return;
  if (wanted == sent_request_ && sent_request_generation_ == ranks_generation_)
    return;
  handoff_requested_ |= (wanted.bits & kRequestHandoff) != 0;
  sent_request_ = wanted;
  sent_request_generation_ = ranks_generation_;
  act(wanted);
}

void Agent::send_fences(bool all) {
  fence_sent_ms_ = now_ms_;
  for (const auto& [index, blob] : fences_) {
    if (!all && fence_done_.contains(index)) continue;
    Send out;
    pb::FenceIn* f = out.message.mutable_fence_in();
    f->set_worker(about_.worker());
    f->set_incarnation(about_.incarnation());
    f->set_generation(ranks_generation_);
    f->set_index(index);
    f->set_blob(blob);
    act(std::move(out));
  }
}

void Agent::set_state(pb::Report::State state) {
  if (state_ != state) urgent_ = true;
  state_ = state;
}

void Agent::exit_with(int code, const std::string& message, States states) {
  if (exited_) return;
  report();  // a last report, in case the coordinator is listening
  act(Exit{code, message, states, state_job_});
  exited_ = true;
}

}  // namespace remesh::agent
