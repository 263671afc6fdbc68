// Follower: shows the progress of a run from the files of the run directory,
// which outlive any coordinator, and the state of the job from the coordinator.
//
// Threads: one. No call blocks.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/rundir/line_file.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

// Estimates the time left from the rate of the last steps, including pauses.
class Pace {
 public:
  void step(int64_t step, double time);
  // Negative if not known yet.
  double left_s(int64_t steps, double now) const;

 private:
  static constexpr size_t kKept = 200;
  std::deque<std::pair<int64_t, double>> seen_;
};

class Follower {
 public:
  // Lines that the files already have are not shown.
  Follower(const pb::Job& job, const std::string& run_dir, Screen* screen);

  // Shows new lines, and queries the coordinator periodically.
  void poll(int64_t now_ms, double now_unix);
  // DONE, STOPPED or FAILED after the job has ended, before that UNKNOWN.
  pb::JobStatus::State outcome() const { return outcome_; }
  const std::string& reason() const { return reason_; }  // of a failure
  bool lacks_slots() const { return lacks_slots_; }
  bool has_workers() const { return has_workers_; }
  bool run_dir_gone() const { return gone_; }
  // Since this object was made.
  bool saw_step() const { return saw_step_; }
  // A coordinator that started since has written the journal.
  bool continued() const { return continued_; }
  // Prints a line that is not from the run.
  void say(const std::string& text, Tone tone, double now_unix);
  // The job has taken a request to stop.
  void await_stop();
  // Whether it has declined that since; says so once.
  bool stop_declined();
  // Shown at the bottom in place of the loss; "" removes it.
  void set_note(const std::string& note) { note_ = note; }

 private:
  void read_events();
  void read_metrics();
  void ask_status(int64_t now_ms);
  void note_status(const pb::JobStatus& status);
  void note_problems(const pb::JobStatus& status);
  void note_gone(bool gone);
  void note_declined();
  void draw(double now_unix);

  std::string run_dir_;
  int64_t log_every_;
  Screen* screen_;
  rundir::LineTail metrics_;
  rundir::LineTail events_;
  Pace pace_;
  Progress progress_;
  double began_ = -1;  // unix seconds
  std::string note_;
  std::string state_note_;    // from the coordinator's last reply
  bool lacks_slots_ = false;  // likewise
  bool has_workers_ = false;  // likewise
  std::string problem_;       // likewise; "": none
  bool had_address_ = false;  // the run directory
  bool gone_ = false;
  bool saw_step_ = false;
  // A wait for slots, shown if it does not end at once.
  std::optional<pb::EventRecord> waiting_;
  bool continued_ = false;
  pb::JobStatus::State outcome_ = pb::JobStatus::UNKNOWN;
  std::string reason_;
  bool stop_pending_ = false;
  bool stop_declined_ = false;
  CommandClient status_client_;
  int64_t asked_ms_ = 0;
  double now_unix_ = 0;
  double step_shown_ = 0;  // unix seconds
};

}  // namespace remesh::ctl
