#include "coordinator/ctl/follower.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "coordinator/ctl/status_view.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/rundir/events.h"
#include "proto/rundir/paths.h"

namespace remesh::ctl {
namespace {

constexpr int64_t kAskEveryMs = 500;
// Workers that are started with the run need no line that they are awaited.
constexpr double kShowWaitingAfterS = 1.5;
// After this long without a reply, connect to the address again.
constexpr int64_t kReplyTimeoutMs = 3000;
// Between lines of steps on a terminal, where events should be seen.
constexpr double kStepLineEveryS = 0.5;

}  // namespace

void Pace::step(int64_t step, double time) {
  seen_.emplace_back(step, time);
  if (seen_.size() > kKept) seen_.pop_front();
}

double Pace::left_s(int64_t steps, double now) const {
  if (seen_.size() < 3) return -1;
  const auto& [first_step, first_time] = seen_.front();
  const auto& [last_step, last_time] = seen_.back();
  if (last_step <= first_step) return -1;
  const double pace =
      (last_time - first_time) / static_cast<double>(last_step - first_step);
  const double left = pace * static_cast<double>(steps - last_step);
  // Decreases between steps too, by at most the length of one step.
  return std::max(left - std::max(now - last_time, 0.0),
                  left > 0 ? left - pace : 0.0);
}

Follower::Follower(const pb::Job& job, const std::string& run_dir,
                   Screen* screen)
    : run_dir_(run_dir),
      log_every_(job.train().log_every()),
      screen_(screen),
      metrics_(rundir::metrics_path(run_dir), /*from_end=*/true),
      events_(rundir::events_path(run_dir), /*from_end=*/true),
      progress_{.steps = job.train().steps()},
      status_client_(run_dir) {}

void Follower::poll(int64_t now_ms, double now_unix) {
  now_unix_ = now_unix;
  read_events();
  if (waiting_ && now_unix - waiting_->time() > kShowWaitingAfterS) {
    say(event_text(*waiting_), Tone::kNotice, waiting_->time());
    waiting_.reset();
  }
  read_metrics();
  ask_status(now_ms);
  draw(now_unix);
}

void Follower::say(const std::string& text, Tone tone, double now_unix) {
  screen_->line(fmt::format("{}  {}", rundir::time_of_day(now_unix), text),
                tone);
}

void Follower::read_events() {
  for (const std::string& line : events_.poll()) {
    const auto event = rundir::parse_event_line(line);
    if (!event.ok()) continue;  // of a newer version, or edited by hand
    const pb::EventRecord& e = event.value();
    continued_ = continued_ || e.event() == events::kCoordinatorStarted ||
                 e.event() == events::kCoordinatorRestarted;
    if (e.event() == events::kWaiting) {
      waiting_ = e;
      continue;
    }
    if (e.event() == events::kMesh) waiting_.reset();
    say(event_text(e), events::tone_of(e.event()), e.time());
    if (e.event() == events::kStopDeclined) note_declined();
    const auto outcome = events::outcome_of(e.event());
    if (outcome != pb::JobStatus::UNKNOWN) outcome_ = outcome;
    if (outcome == pb::JobStatus::FAILED) reason_ = e.cause();
  }
}

void Follower::read_metrics() {
  for (const std::string& line : metrics_.poll()) {
    const auto parsed = rundir::parse_metrics_line(line);
    if (!parsed.ok()) continue;
    const pb::StepMetrics& m = parsed.value();
    saw_step_ = true;
    progress_.step = m.step();
    progress_.loss = m.loss();
    pace_.step(m.step(), m.time());
    const bool special =
        m.step() == 1 || m.step() == progress_.steps || m.has_val_loss();
    const bool calm =
        !screen_->is_terminal() || now_unix_ - step_shown_ >= kStepLineEveryS;
    if (!special && (!calm || m.step() % log_every_ != 0)) continue;
    step_shown_ = now_unix_;
    screen_->line(step_line(m, progress_.steps, screen_->style().width));
  }
}

void Follower::ask_status(int64_t now_ms) {
  if (status_client_.waiting()) {
    if (const auto reply = status_client_.poll()) {
      note_status(reply->status());
    } else if (now_ms - asked_ms_ > kReplyTimeoutMs) {
      state_note_ = "unreachable";
      status_client_.disconnect();
    }
    return;
  }
  if (now_ms - asked_ms_ < kAskEveryMs) return;
  asked_ms_ = now_ms;
  status_client_.send(command_of(pb::Command::STATUS));
  std::error_code error;
  const bool there = std::filesystem::exists(run_dir_, error) || error;
  // A coordinator that does not get that far removes what it has made.
  had_address_ |= status_client_.waiting();
  // Without its address the coordinator cannot be asked.
  if (!status_client_.waiting())
    note_gone((had_address_ || continued_) && !there);
}

void Follower::await_stop() {
  stop_pending_ = true;
  status_client_.disconnect();  // a reply on its way is older
}

void Follower::note_declined() {
  stop_declined_ = std::exchange(stop_pending_, false) || stop_declined_;
}

bool Follower::stop_declined() { return std::exchange(stop_declined_, false); }

void Follower::note_status(const pb::JobStatus& status) {
  // A full disk has no room for the event.
  if (!status.stop_requested() && !has_ended(status.state())) note_declined();
  const bool runs = status.state() == pb::JobStatus::RUNNING;
  state_note_ = runs ? "" : state_text(status);
  note_problems(status);
  lacks_slots_ = status.missing_slots() > 0;
  has_workers_ = std::ranges::any_of(status.workers(), [](const auto& w) {
    return w.state() != pb::WorkerStatus::DEAD;
  });
}

void Follower::note_gone(bool gone) {
  if (gone == gone_) return;
  gone_ = gone;
  say(gone ? fmt::format("the run directory {} is gone; the ranks train on, "
                         "but nothing is recorded. Put it back, or press "
                         "Ctrl-C to end the run without saving",
                         run_dir_)
           : "the run directory is back",
      gone ? Tone::kBad : Tone::kNotice, now_unix_);
}

// Says when something begins to keep the coordinator from its work, and when
// that ends.
void Follower::note_problems(const pb::JobStatus& status) {
  note_gone(status.run_dir_gone());
  std::string now;
  if (!gone_ && status.problems_size() > 0) now = status.problems(0).text();
  if (now == problem_) return;
  say(now.empty() ? "the run directory can be written again"
                  : now + "; training continues",
      now.empty() ? Tone::kNotice : Tone::kBad, now_unix_);
  problem_ = now;
}

void Follower::draw(double now_unix) {
  if (began_ < 0) began_ = now_unix;
  progress_.elapsed_s = std::floor(now_unix - began_);
  progress_.left_s = pace_.left_s(progress_.steps, now_unix);
  progress_.note = note_.empty() ? state_note_ : note_;
  screen_->resize();
  screen_->bottom(progress_line(progress_, screen_->style()));
}

}  // namespace remesh::ctl
