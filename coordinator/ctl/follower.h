// Follower: shows a run as it goes, from the run directory's files, which
// outlive any coordinator, and from the coordinator's answers for what no file
// says ("waiting for workers: 0 of 1 slots").
//
// Threads: one. Nothing here blocks.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/rundir/line_file.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

// Estimates the time left from the pace of the last steps, pauses included,
// so that it tells what a clock on the wall will show.
class Pace {
 public:
  void step(int64_t step, double time);
  // Negative: not known yet.
  double left_s(int64_t steps, double now) const;

 private:
  static constexpr size_t kKept = 200;
  std::deque<std::pair<int64_t, double>> seen_;
};

class Follower {
 public:
  // Lines that are in the files already are not shown.
  Follower(const pb::Job& job, std::string run_dir, Screen* screen);

  // Reads what is new, shows it, asks the coordinator now and then.
  void poll(int64_t now_ms, double now_unix);
  // "done", "stopped" or "failed" once the job has ended, else "".
  const std::string& outcome() const { return outcome_; }
  const std::string& reason() const { return reason_; }  // of a failure
  int64_t last_step() const { return last_step_; }
  // Lines of our own, among the run's.
  void say(const std::string& text, Tone tone, double now_unix);
  // Shown at the bottom instead of the loss; "" ends it.
  void set_note(const std::string& note) { note_ = note; }

 private:
  void read_events();
  void read_metrics();
  void ask_status(int64_t now_ms);
  void draw(double now_unix);

  int64_t steps_;
  int64_t log_every_;
  std::string run_dir_;
  Screen* screen_;
  rundir::LineTail metrics_;
  rundir::LineTail events_;
  Pace pace_;
  int64_t last_step_ = 0;
  double loss_ = 0;
  std::string note_;
  std::string state_;  // of the coordinator's last answer
  std::string detail_;
  std::string outcome_;
  std::string reason_;
  std::string address_;
  std::unique_ptr<Asker> asker_;
  int64_t asked_ms_ = 0;
};

}  // namespace remesh::ctl
