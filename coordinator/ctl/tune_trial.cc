#include "coordinator/ctl/tune_trial.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "coordinator/rundir/lines.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/rundir/paths.h"

namespace remesh::ctl {
namespace {

constexpr int kTrial = 1, kStop = 2;  // children
// To end after a stop, which saves: a run that ends without saving leaves its
// state in memory.
constexpr int64_t kStopMs = 120'000;

class TrialRun {
 public:
  TrialRun(const TrialOptions& options,
           const std::function<void(int64_t)>& on_step)
      : options_(options),
        on_step_(on_step),
        metrics_(rundir::metrics_path(options.run_dir), /*from_end=*/false) {}

  TrialResult run(const std::function<int()>& interrupts) {
    const auto started = children_.start(kTrial, options_.argv, output_.path());
    if (!started.ok()) return {.error = started.status().message()};
    heard_ms_ = monotonic_ms();
    began_ = !options_.queued;
    constexpr auto kPoll = std::chrono::milliseconds(50);
    for (; !ended_; std::this_thread::sleep_for(kPoll)) {
      if (const int asked = interrupts(); asked > 0) {
        result_.interrupted = true;
        if (asked > 1) break;
        stop("");
      }
      read_steps();
      watch();
      reap();
    }
    children_.kill_all();
    read_steps();
    return finish();
  }

 private:
  void read_steps() {
    for (const std::string& line : metrics_.poll())
      if (const auto m = rundir::parse_metrics_line(line); m.ok()) {
        step_s_.push_back(m->step_s());
        heard_ms_ = monotonic_ms();
        on_step_(static_cast<int64_t>(step_s_.size()));
      }
  }

  void watch() {
    const int64_t now = monotonic_ms();
    if (!began_) {
      began_ = path_exists(rundir::journal_path(options_.run_dir));
      heard_ms_ = now;
    }
    if (stopped_ms_ >= 0) {
      // Before the coordinator listens, nobody hears a stop.
      if (now >= stop_again_ms_) send_stop();
      ended_ = ended_ || now - stopped_ms_ > kStopMs;
      return;
    }
    if (now - heard_ms_ > 1000 * options_.silence_s)
      return stop(fmt::format("no step within {} s", options_.silence_s));
    constexpr size_t kEnough = 2;
    if (options_.best_s > 0 && step_s_.size() >= kUncountedSteps + kEnough &&
        *step_time(step_s_) > kHopeless * options_.best_s)
      stop("");
  }

  // `error`: why it has failed; "": it has not.
  void stop(const std::string& error) {
    if (stopped_ms_ >= 0) return;
    stopped_ms_ = monotonic_ms();
    result_.error = error;
    send_stop();
  }
  void send_stop() {
    stop_again_ms_ = INT64_MAX;
    if (!began_) return children_.signal(kTrial, SIGTERM);
    if (!children_.start(kStop, options_.stop, "/dev/null").ok()) ended_ = true;
  }

  void reap() {
    for (const Ended& e : children_.reap()) {
      constexpr int64_t kStopAgainMs = 500;
      if (e.child == kStop && e.exit_code != 0)
        stop_again_ms_ = monotonic_ms() + kStopAgainMs;
      if (e.child != kTrial) continue;
      ended_ = true;
      if (stopped_ms_ < 0 && (e.exit_code != 0 || e.signal != 0))
        result_.error = e.to_text() + last_words();
    }
  }

  // What the run said last.
  std::string last_words() const {
    const std::vector<std::string> lines = output_.lines();
    for (auto line = lines.rbegin(); line != lines.rend(); ++line)
      if (!line->empty()) return ": " + *line;
    return "";
  }

  TrialResult finish() {
    if (result_.interrupted || !result_.error.empty()) return result_;
    result_.step_s = step_time(step_s_);
    if (!result_.step_s)
      result_.error =
          fmt::format("it made {} steps, too few to measure", step_s_.size());
    return result_;
  }

  const TrialOptions& options_;
  const std::function<void(int64_t)>& on_step_;
  rundir::LineTail metrics_;
  Output output_;
  Children children_;
  std::vector<double> step_s_;
  int64_t heard_ms_ = 0;     // the last step, or the start
  int64_t stopped_ms_ = -1;  // -1: not stopped
  int64_t stop_again_ms_ = 0;
  bool began_ = false;  // a coordinator has
  bool ended_ = false;
  TrialResult result_;
};

}  // namespace

std::optional<double> step_time(const std::vector<double>& step_s) {
  if (step_s.size() <= kUncountedSteps) return std::nullopt;
  std::vector<double> counted(step_s.begin() + kUncountedSteps, step_s.end());
  std::sort(counted.begin(), counted.end());
  const size_t n = counted.size();
  return (counted[(n - 1) / 2] + counted[n / 2]) / 2;
}

TrialResult run_trial(const TrialOptions& options,
                      const std::function<void(int64_t)>& on_step,
                      const std::function<int()>& interrupts) {
  return TrialRun(options, on_step).run(interrupts);
}

}  // namespace remesh::ctl
