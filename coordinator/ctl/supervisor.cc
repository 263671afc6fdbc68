#include "coordinator/ctl/supervisor.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "proto/base/exit_code.h"

namespace remesh::ctl {

std::vector<Action> Supervisor::on(const Event& event, int64_t now_ms) {
  now_ms_ = now_ms;
  actions_.clear();
  if (!exited_) std::visit([this](const auto& e) { handle(e); }, event);
  return std::move(actions_);
}

void Supervisor::handle(const Begin& e) {
  if (e.lock_holder == 0) return start_coordinator();
  following_ = true;
  say(fmt::format("a coordinator already runs this job (pid {}); following it",
                  e.lock_holder));
}

void Supervisor::handle(const Tick& e) {
  tick_ = e;
  if (stage_ == Stage::kStarting && e.coordinator_listens) {
    enter(Stage::kRunning);
    act(PrintWelcome{});
    for (int i = 1; i <= options_.local_workers; ++i)
      if (!running_.contains(i)) start_worker(i);
  } else if (stage_ < Stage::kLeaving && following_ &&
             e.outcome != pb::JobStatus::UNKNOWN) {
    code_ = e.outcome == pb::JobStatus::FAILED ? kExitFailed : kExitOk;
    leave();
  } else if (stage_ >= Stage::kLeaving) {
    shut_down();
  }
  if (exited_ || stage_ >= Stage::kLeaving) return;
  take_over(e);
  give_hint(e);
  start_due();
  end_without_workers(e);
  if (interrupted() && !following_ && stage_ < Stage::kLeaving) await_stop();
}

void Supervisor::await_stop() {
  if (stop_accepted_) return;
  if (now_ms_ - stop_since_ms_ >= options_.stop_timeout_ms) {
    reason_ = fmt::format(
        "the coordinator has not {} the stop within {} s (--stop-timeout){}; "
        "the job is not saved",
        not_now_.empty() ? "answered" : "accepted",
        options_.stop_timeout_ms / 1000,
        not_now_.empty() ? "" : ": " + not_now_);
    say(reason_ + ", killing all processes", Tone::kBad);
    code_ = kExitFailed;
    return kill_ranks();
  }
  if (now_ms_ - stop_sent_ms_ >= kStopResendMs) send_stop();
}

// All local workers have ended for reasons that a new one would meet too, and
// the coordinator hears no others.
void Supervisor::end_without_workers(const Tick& e) {
  const auto workers = static_cast<size_t>(options_.local_workers);
  if (stage_ != Stage::kRunning || workers == 0 ||
      unrecoverable_.size() < workers || e.has_workers || interrupted()) {
    no_worker_since_ms_ = -1;
    return;
  }
  if (no_worker_since_ms_ < 0) no_worker_since_ms_ = now_ms_;
  if (now_ms_ - no_worker_since_ms_ < kNoWorkerMs) return;
  const std::string& why = unrecoverable_.rbegin()->second;
  give_up("no worker can run here" + (why.empty() ? "" : ": " + why));
}

void Supervisor::handle(const Interrupt&) {
  if (interrupts_ > 0 && now_ms_ - interrupted_ms_ < kInterruptGapMs) return;
  interrupted_ms_ = stop_since_ms_ = now_ms_;
  ++interrupts_;
  if (interrupts_ == 1 && following_) {
    say("no longer following; training continues, `remesh stop` ends it");
    leave();
  } else if (tick_.run_dir_gone) {
    say("killing all processes", Tone::kBad);
    reason_ = "the run directory is gone; the run ended without saving";
    code_ = kExitFailed;
    kill_ranks();
  } else if (interrupts_ == 1) {
    say("saving and stopping; press Ctrl-C again to kill immediately");
    act(SetNote{"saving and stopping"});
    send_stop();
  } else if (interrupts_ == 2) {
    say("killing all processes", Tone::kBad);
    kill_ranks();
  } else {
    exited_ = true;
    act(Exit{kExitInterrupted});
  }
}

void Supervisor::kill_ranks() {
  enter(Stage::kKillingRanks);
  act(SignalChild{kCoordinator, SIGKILL});
  // A worker that is asked twice kills its ranks; shut_down() asks again.
  signal_workers(SIGTERM);
}

void Supervisor::handle(const ChildExited& e) {
  running_.erase(e.how.child);
  if (e.how.child == kCoordinator) {
    coordinator_exited(e);
  } else {
    worker_exited(e);
  }
}

void Supervisor::handle(const StartFailed& e) {
  running_.erase(e.child);
  if (e.child == kCoordinator) return give_up(e.error);
  say(e.error, Tone::kBad);
  if (options_.respawn && !interrupted())
    respawn_at_[e.child] = now_ms_ + kRespawnDelayMs;
  else
    unrecoverable_[e.child] = e.error;
}

void Supervisor::handle(const StopAnswered& e) {
  stop_accepted_ = e.accepted;
  if (not_now_.empty() && !e.not_now.empty())
    say(e.not_now + "; asking again", Tone::kBad);
  not_now_ = e.not_now;
}

// The next interrupt tries again to save. A coordinator that has restarted may
// not know of the stop yet.
void Supervisor::handle(const StopDeclined&) {
  if (interrupts_ != 1 || following_ || !stop_accepted_) return;
  interrupts_ = 0;
  stop_accepted_ = false;
  act(SetNote{""});
  say("training continues; make room and press Ctrl-C again, or end it without "
      "saving: remesh stop --discard",
      Tone::kBad);
}

void Supervisor::coordinator_exited(const ChildExited& e) {
  if (stage_ >= Stage::kLeaving) return;
  const Ended& how = e.how;
  const bool never_listened =
      stage_ == Stage::kStarting && how.signal == 0 && how.exit_code != kExitOk;
  // Another signal comes without a word, and the last one is of the start.
  const bool explained = how.signal == 0 || how.signal == SIGABRT;
  const std::string last =
      how.to_text() +
      (e.last_line.empty() || !explained ? "" : ": " + e.last_line);
  if (never_listened || (how.signal == 0 && how.exit_code == kExitUsage)) {
    // Somebody else was faster, or the disk is full.
    if (took_over_ && how.exit_code == kExitTryAgain) {
      following_ = true;
      return enter(Stage::kRunning);
    }
    if (!running_.empty()) {
      give_up("the coordinator cannot be started again: " + last);
      if (how.exit_code == kExitUsage) code_ = kExitUsage;
      return;
    }
    failed_to_start_ = exited_ = true;
    return act(Exit{how.exit_code});
  }
  // Its predecessor had ended the job when it was killed.
  if (how.signal == 0 && how.exit_code == kExitEnded) {
    code_ = tick_.outcome == pb::JobStatus::FAILED ? kExitFailed : kExitOk;
    return leave();
  }
  if (how.signal == 0 &&
      (how.exit_code == kExitOk || how.exit_code == kExitFailed)) {
    code_ = how.exit_code;
    return leave();
  }
  while (!starts_.empty() && now_ms_ - starts_.front() > kRestartWindowMs)
    starts_.pop_front();
  // A full disk may last; the ranks train on.
  const bool temporary = how.signal == 0 && how.exit_code == kExitTryAgain;
  const size_t most = tick_.trained ? kMaxRestarts : kMaxRestartsUntrained;
  if (starts_.size() > most && !temporary)
    return give_up(
        fmt::format("the coordinator died {} times within a minute{}, the last "
                    "time with {}; see {}",
                    starts_.size(), tick_.trained ? "" : " and before any step",
                    last, options_.logs));
  const size_t restarts = starts_.size() < 2 ? 0 : starts_.size() - 2;
  restart_at_ms_ =
      now_ms_ + std::min(kMaxRestartDelayMs, kFirstRestartDelayMs << restarts);
  say(fmt::format("the coordinator ended with {}; restarting it{}", last,
                  tick_.trained ? ", training continues" : ""),
      Tone::kBad);
}

void Supervisor::worker_exited(const ChildExited& e) {
  if (stage_ >= Stage::kLeaving) return;
  // A worker that exits cleanly was asked to; the events say why.
  if (e.how.signal == 0 && e.how.exit_code == 0) return;
  say(fmt::format("worker process {} ended with {}", e.how.pid,
                  e.how.to_text()),
      Tone::kBad);
  if (e.how.signal == 0 && !e.last_line.empty()) say(e.last_line, Tone::kBad);
  const int code = e.how.exit_code;
  const bool for_good = code == kExitUsage || code == kExitFailed ||
                        code == kExitNotFound ||
                        (code == kExitTryAgain && !options_.respawn);
  if (e.how.signal == 0 && for_good) {
    unrecoverable_[e.how.child] = e.last_line;
  } else if (options_.respawn && !interrupted()) {
    respawn_at_[e.how.child] = now_ms_ + kRespawnDelayMs;
  }
}

// A followed coordinator that is gone without having ended the job either was
// just ending it or died. Where the run directory was, a new one would start a
// new run.
void Supervisor::take_over(const Tick& e) {
  if (!following_ || interrupted() || e.outcome != pb::JobStatus::UNKNOWN ||
      e.coordinator_alive || e.run_dir_gone) {
    gone_since_ms_ = -1;
    return;
  }
  if (gone_since_ms_ < 0) gone_since_ms_ = now_ms_;
  if (now_ms_ - gone_since_ms_ < kTakeOverMs) return;
  say("the followed coordinator is gone; starting a new one");
  following_ = false;
  took_over_ = true;
  enter(Stage::kStarting);
  start_coordinator();
}

// Once each time slots are lacking, but not while workers are just starting.
void Supervisor::give_hint(const Tick& e) {
  if (!e.lacks_slots) {
    lacking_since_ms_ = -1;
  } else if (lacking_since_ms_ < 0) {
    lacking_since_ms_ = now_ms_;
  } else if (lacking_since_ms_ <= now_ms_ &&
             now_ms_ - lacking_since_ms_ >= kHintMs) {
    say(options_.hint);
    lacking_since_ms_ = INT64_MAX;
  }
}

void Supervisor::start_due() {
  if (restart_at_ms_ >= 0 && now_ms_ >= restart_at_ms_) {
    restart_at_ms_ = -1;
    stop_accepted_ = false;  // the new coordinator may not know of it
    stop_since_ms_ = now_ms_;
    start_coordinator();
  }
  for (auto it = respawn_at_.begin(); it != respawn_at_.end();) {
    if (now_ms_ < it->second) {
      ++it;
      continue;
    }
    start_worker(it->first);
    it = respawn_at_.erase(it);
  }
}

// From the end of the job to the exit of the last child.
void Supervisor::shut_down() {
  const int64_t since = now_ms_ - stage_since_ms_;
  if (running_.empty()) {
    exited_ = true;
    return act(Exit{final_code()});
  }
  if (stage_ == Stage::kLeaving) {
    // Whoever was told to leave may have a long step to finish, and to save.
    if (since <= (asked_to_leave() ? options_.stop_timeout_ms : kLeaveMs))
      return;
    signal_workers(SIGTERM);
    enter(Stage::kTerminating);
  } else if (since >
             (stage_ == Stage::kKillingRanks ? kKillRanksMs : kTerminateMs)) {
    running_.clear();
    act(KillAll{});
  } else if (stage_ == Stage::kKillingRanks && since > kAskAgainMs &&
             !std::exchange(asked_again_, true)) {
    signal_workers(SIGTERM);
  }
}

// Scripts tell a job that is done from one that somebody stopped.
int Supervisor::final_code() const {
  if (code_ != kExitOk) return code_;
  if (interrupted()) return kExitInterrupted;
  return tick_.outcome == pb::JobStatus::STOPPED  ? kExitEnded
         : tick_.outcome == pb::JobStatus::FAILED ? kExitFailed
                                                  : kExitOk;
}

void Supervisor::start_coordinator() {
  starts_.push_back(now_ms_);
  running_.insert(kCoordinator);
  act(StartCoordinator{.resume = !tick_.continued});
}

void Supervisor::start_worker(int number) {
  running_.insert(number);
  unrecoverable_.erase(number);
  act(StartWorker{number});
}

void Supervisor::signal_workers(int signal) {
  for (const int child : running_)
    if (child != kCoordinator) act(SignalChild{child, signal});
}

void Supervisor::send_stop() {
  stop_sent_ms_ = now_ms_;
  act(SendStop{});
}

void Supervisor::enter(Stage stage) {
  stage_ = stage;
  stage_since_ms_ = now_ms_;
}

void Supervisor::leave() {
  if (stage_ >= Stage::kLeaving) return;
  enter(Stage::kLeaving);
  // At the end of a job the coordinator dismisses the workers. Those of a job
  // that continues without us, or that lost its coordinator, are told here.
  if (asked_to_leave()) signal_workers(SIGTERM);
}

bool Supervisor::asked_to_leave() const {
  return following_ || !reason_.empty();
}

void Supervisor::give_up(const std::string& reason) {
  reason_ = reason;
  code_ = kExitFailed;
  // Its journal says how to continue.
  if (!following_ && running_.contains(kCoordinator))
    act(SignalChild{kCoordinator, SIGTERM});
  leave();
}

void Supervisor::say(std::string text, Tone tone) {
  act(Say{std::move(text), tone});
}

}  // namespace remesh::ctl
