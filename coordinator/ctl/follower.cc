#include "coordinator/ctl/follower.h"

#include <fmt/format.h>

#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/rundir/events.h"

namespace remesh::ctl {
namespace {

constexpr int64_t kAskEveryMs = 500;
// After this long without a reply, connect to the address again.
constexpr int64_t kReplyTimeoutMs = 3000;

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

Follower::Follower(const pb::Job& job, std::string run_dir, Screen* screen)
    : steps_(job.train().steps()),
      log_every_(job.train().log_every()),
      run_dir_(std::move(run_dir)),
      screen_(screen),
      metrics_(rundir::metrics_path(run_dir_), /*from_end=*/true),
      events_(rundir::events_path(run_dir_), /*from_end=*/true) {}

void Follower::poll(int64_t now_ms, double now_unix) {
  read_events();
  read_metrics();
  ask_status(now_ms);
  draw(now_unix);
}

void Follower::say(const std::string& text, Tone tone, double now_unix) {
  screen_->line(fmt::format("{}  {}", clock_text(now_unix), text), tone);
  screen_->flush();
}

void Follower::read_events() {
  for (const std::string& line : events_.poll()) {
    const auto event = rundir::parse_event_line(line);
    if (!event.ok()) continue;  // of a newer version, or edited by hand
    const pb::EventRecord& e = event.value();
    say(event_text(e), event_tone(e), e.time());
    if (e.event() == events::kJobDone) outcome_ = "done";
    if (e.event() == events::kJobStopped) outcome_ = "stopped";
    if (e.event() == events::kJobFailed) {
      outcome_ = "failed";
      reason_ = e.cause();
    }
  }
}

void Follower::read_metrics() {
  for (const std::string& line : metrics_.poll()) {
    const auto parsed = rundir::parse_metrics_line(line);
    if (!parsed.ok()) continue;
    const pb::StepMetrics& m = parsed.value();
    last_step_ = m.step();
    loss_ = m.loss();
    pace_.step(m.step(), m.time());
    if (m.step() % log_every_ == 0 || m.step() == 1 || m.step() == steps_ ||
        m.has_val_loss()) {
      screen_->line(step_line(m, steps_));
    }
  }
  screen_->flush();
}

void Follower::ask_status(int64_t now_ms) {
  if (asker_ && asker_->waiting()) {
    if (const auto reply = asker_->poll()) {
      state_ = reply->status().state();
      detail_ = reply->status().detail();
    } else if (now_ms - asked_ms_ > kReplyTimeoutMs) {
      state_ = "unreachable";
      asker_.reset();
    }
    return;
  }
  if (now_ms - asked_ms_ < kAskEveryMs) return;
  asked_ms_ = now_ms;
  const auto endpoint = rundir::read_endpoint(run_dir_);
  if (!endpoint.ok()) return;
  if (!asker_ || endpoint.value().address != address_) {
    address_ = endpoint.value().address;
    auto asker = Asker::connect(address_);
    if (!asker.ok()) return;
    asker_ = std::move(*asker);
  }
  asker_->send(pb::Command());
}

void Follower::draw(double now_unix) {
  Progress p{.step = last_step_, .steps = steps_, .loss = loss_};
  p.left_s = pace_.left_s(steps_, now_unix);
  p.note = note_;
  if (p.note.empty() && state_ == "waiting" && !detail_.empty()) {
    p.note = "waiting for workers";
  } else if (p.note.empty() && !state_.empty() && state_ != "running") {
    p.note = state_;
  }
  screen_->resize();
  screen_->bottom(progress_line(p, screen_->style()));
}

}  // namespace remesh::ctl
