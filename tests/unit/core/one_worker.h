// A coordinator and one worker "a" with one slot, told and heard by hand.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {

class OneWorker {
 public:
  static Options options(int64_t max_same = 1000) {
    Options o;
    o.job = text_message<pb::Job>(R"(
        train {
          steps: 1000 global_batch_size: 4 local_batch_size: 1
          max_skipped_steps: 2
        }
        elastic {
          join_window_ms: 0 dead_after_ms: 1000000
          max_failures_without_progress: 1000
        })");
    o.job.mutable_elastic()->set_max_same_failures(max_same);
    return o;
  }
  explicit OneWorker(int64_t max_same = 1000) : OneWorker(options(max_same)) {}
  explicit OneWorker(const Options& options) : options_(options) {
    core_.emplace(options);
    take(core_->start(now_));
  }
  // The coordinator, from its journal and this last finished step.
  void restart(int64_t last_finished) {
    Options o = options_;
    o.last_finished_step = last_finished;
    o.restored = core_->durable();
    core_.emplace(std::move(o));
    take(core_->start(now_));
    report(pb::Report::QUIESCED);
  }
  void stop(bool discard = true) {
    pb::Command c;
    c.set_kind(pb::Command::STOP);
    c.set_discard(discard);
    take(core_->on(CommandReceived{1, c}, now_));
  }
  void be_absent(int64_t ms) { now_ += ms; }

  // Reports that state; at most one rank, as given (STARTING if its phase is
  // not), and metrics of this loss for its step.
  void report(pb::Report::State state,
              std::optional<pb::RankStatus> rank = std::nullopt,
              const std::string& worker = "a", double loss = 0) {
    pb::Report r = core::report(worker, ++seq_);
    r.set_host("h");
    r.set_generation(core_->durable().generation());
    r.set_state(state);
    if (rank) *r.add_ranks() = *rank;
    for (pb::RankStatus& s : *r.mutable_ranks())
      if (!s.has_phase()) s.set_phase(pb::RankStatus::STARTING);
    if (loss > 0) {
      pb::StepMetrics* m = r.add_metrics();
      m->set_generation(r.generation());
      m->set_step(rank->committed_step());
      m->set_loss(loss);
    }
    take(core_->on(received(r), now_));
  }
  void tick(const Tick& tick) {
    now_ += 50;
    take(core_->on(tick, now_));
  }
  void pass(int64_t ms) {
    for (const int64_t until = now_ + ms; now_ < until;) tick({});
  }
  // From waiting to running, with this scan.
  void run(const CheckpointsScanned& scan) {
    report(pb::Report::IDLE);
    take(core_->on(scan, now_));
    if (phase() != pb::Durable::PREPARING) return;
    report(pb::Report::PREPARED);
  }
  void fail(int exit_code = 1, int64_t step = 0) {
    auto s = text_message<pb::RankStatus>("rank: 0 exited: true");
    s.set_step(step);
    s.set_exit_code(exit_code);
    report(pb::Report::RUNNING, s);
    report(pb::Report::QUIESCED, s);
  }
  void take(std::vector<Action> actions) {
    if (!all_of<ScanCheckpoints>(actions).empty()) scan_asked_ms = now_;
    for (const EmitEvent& e : all_of<EmitEvent>(actions))
      events.push_back(e.record.event());
    last = std::move(actions);
  }
  pb::Durable::Phase phase() const { return core_->durable().phase(); }
  const pb::Durable& durable() const { return core_->durable(); }
  int64_t now() const { return now_; }
  bool ended() const { return core_->ended(); }

  int64_t scan_asked_ms = -1;
  std::vector<Action> last;
  std::vector<std::string> events;  // so far

 private:
  Options options_;
  std::optional<Coordinator> core_;
  int64_t now_ = 0;
  uint64_t seq_ = 0;
};

}  // namespace remesh::core
