// Supervisor: everything `remesh run` decides, as a pure state machine.
//
// on(event, now_ms) returns what the shell (run.cc) does next, in order. There
// are no processes, files, sockets or clocks here. The shell ticks every
// kTickMs, reports each child that exits and performs the actions.
//
// Guarantees: a coordinator that crashes is restarted with a growing delay, at
// most kMaxRestarts times a minute, and fewer times before the first step; a
// coordinator that exits by itself ends the run with its exit code; the first
// interrupt saves and stops, a second one kills; the run ends when nothing that
// it waits for can come: if no worker is left and all that were started would
// fail again, or if nobody answers a stop; Exit is returned once, after every
// child has exited or was killed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/ctl/children.h"
#include "coordinator/ctl/render.h"

namespace remesh::ctl {

// Children are numbered: 0 is the coordinator, 1 and up are local workers.
inline constexpr int kCoordinator = 0;

// ------------------------------------------------------------------ events

// First event of all. `lock_holder`: pid of the coordinator that already runs
// this job, which is then followed; 0 if there is none.
struct Begin {
  int lock_holder = 0;
};
struct Tick {
  // The run directory has the endpoint of the coordinator that was started or
  // is followed.
  bool coordinator_listens = false;
  // Only sampled while a coordinator is followed: one holds the run's lock.
  bool coordinator_alive = false;
  // DONE, STOPPED or FAILED; UNKNOWN while the job runs.
  pb::JobStatus::State outcome = pb::JobStatus::UNKNOWN;
  bool lacks_slots = false;   // the coordinator waits for workers
  bool has_workers = false;   // the coordinator hears some
  bool trained = false;       // a step was finished in this session
  bool run_dir_gone = false;  // so that no stop can be recorded
  bool continued = false;  // a coordinator has journaled that in this session
};
// SIGINT, SIGTERM or SIGHUP.
struct Interrupt {};
struct ChildExited {
  Ended how;
  std::string last_line;  // of its output
};
struct StartFailed {
  int child = 0;
  std::string error;
};
// The coordinator's answer to SendStop.
struct StopAnswered {
  bool accepted = false;
  std::string not_now;  // why it does not stop now, if it may later
};
// The job could not be saved and continues.
struct StopDeclined {};
using Event = std::variant<Begin, Tick, Interrupt, ChildExited, StartFailed,
                           StopAnswered, StopDeclined>;

// ----------------------------------------------------------------- actions

struct StartCoordinator {
  // Pass --resume on, because it is not known to be in the journal yet. Later
  // it would lift a stop.
  bool resume = false;
};
struct StartWorker {
  int number = 0;
};
struct SignalChild {
  int child = 0;
  int signal = 0;
};
// SIGKILL to all children, which are reaped without a ChildExited.
struct KillAll {};
struct SendStop {};
// Print the run directory and how other workers join.
struct PrintWelcome {};
struct Say {
  std::string text;
  Tone tone = Tone::kNotice;
};
// Replaces the loss at the bottom of the screen.
struct SetNote {
  std::string text;
};
struct Exit {
  int code = 0;
};
using Action = std::variant<StartCoordinator, StartWorker, SignalChild, KillAll,
                            SendStop, PrintWelcome, Say, SetNote, Exit>;

class Supervisor {
 public:
  static constexpr int kTickMs = 50;
  static constexpr int64_t kStopResendMs = 1000;
  // Signals that come together are one interrupt: `timeout` signals both the
  // process and its group, a shell and the terminal both send SIGHUP.
  static constexpr int64_t kInterruptGapMs = 1000;
  // For the coordinator to hear that the last worker has gone.
  static constexpr int64_t kNoWorkerMs = 1000;
  // Time for the workers to leave by themselves after the end of the job, after
  // SIGTERM at that end, and after the second interrupt.
  static constexpr int64_t kLeaveMs = 6000;
  static constexpr int64_t kTerminateMs = 3000;
  static constexpr int64_t kKillRanksMs = 3000;
  // A worker takes signals within a second for one.
  static constexpr int64_t kAskAgainMs = 1500;
  static constexpr int64_t kFirstRestartDelayMs = 100;
  static constexpr int64_t kMaxRestartDelayMs = 5000;
  static constexpr size_t kMaxRestarts = 10;
  static constexpr size_t kMaxRestartsUntrained = 3;
  static constexpr int64_t kRestartWindowMs = 60'000;
  static constexpr int64_t kRespawnDelayMs = 1000;
  // A followed coordinator that is gone for this long is replaced; whoever
  // restarts it takes the lock sooner.
  static constexpr int64_t kTakeOverMs = 3000;

  // With too few slots for this long, say what to do.
  static constexpr int64_t kHintMs = 3000;

  struct Options {
    int local_workers = 0;
    int64_t stop_timeout_ms = 30'000;  // for a stop to be answered
    std::string hint;                  // how to get more slots
    bool respawn = false;
    std::string logs;  // folder of the logs, for messages
  };
  explicit Supervisor(Options options) : options_(std::move(options)) {}

  std::vector<Action> on(const Event& event, int64_t now_ms);

  // The coordinator is not a child of this process.
  bool following() const { return following_; }
  bool interrupted() const { return interrupts_ > 0; }
  // The coordinator exited by itself before it listened; its output says why.
  bool failed_to_start() const { return failed_to_start_; }
  // Why the supervisor itself gave up, else "".
  const std::string& reason() const { return reason_; }

 private:
  enum class Stage {
    kStarting,  // no coordinator listens yet
    kRunning,
    kLeaving,       // the job has ended; workers leave by themselves
    kTerminating,   // the workers were sent SIGTERM
    kKillingRanks,  // second interrupt: the workers kill their ranks
  };

  void handle(const Begin& e);
  void handle(const Tick& e);
  void handle(const Interrupt& e);
  void handle(const ChildExited& e);
  void handle(const StartFailed& e);
  void handle(const StopAnswered& e);
  void handle(const StopDeclined& e);

  void coordinator_exited(const ChildExited& e);
  void worker_exited(const ChildExited& e);
  void take_over(const Tick& e);
  void end_without_workers(const Tick& e);
  void await_stop();
  void kill_ranks();
  bool asked_to_leave() const;  // the workers were, when kLeaving began
  int final_code() const;
  void give_hint(const Tick& e);
  void start_due();
  void shut_down();
  void start_coordinator();
  void start_worker(int number);
  void signal_workers(int signal);
  void send_stop();
  void enter(Stage stage);
  void leave();
  void give_up(const std::string& reason);
  void say(std::string text, Tone tone = Tone::kNotice);
  template <typename A>
  void act(A action) {
    actions_.push_back(std::move(action));
  }

  Options options_;
  int64_t now_ms_ = 0;
  std::vector<Action> actions_;
  Stage stage_ = Stage::kStarting;
  int64_t stage_since_ms_ = 0;
  bool following_ = false;
  bool took_over_ = false;             // from the coordinator that was followed
  bool asked_again_ = false;           // the workers, in kKillingRanks
  std::set<int> running_;              // children
  std::deque<int64_t> starts_;         // of the coordinator, in the window
  int64_t gone_since_ms_ = -1;         // the followed coordinator; -1: alive
  int64_t restart_at_ms_ = -1;         // the coordinator; -1: not due
  std::map<int, int64_t> respawn_at_;  // worker number -> time
  // By number, the last line of local workers that would fail again.
  std::map<int, std::string> unrecoverable_;
  int64_t no_worker_since_ms_ = -1;
  int interrupts_ = 0;
  int64_t interrupted_ms_ = 0;  // the last one that counted
  int64_t stop_since_ms_ = 0;   // that this coordinator has to answer a stop
  bool stop_accepted_ = false;
  std::string not_now_;  // why the coordinator did not accept the stop, said
  int64_t stop_sent_ms_ = 0;
  int code_ = 0;
  std::string reason_;
  Tick tick_;                      // the newest
  int64_t lacking_since_ms_ = -1;  // slots; -1: does not lack any
  bool failed_to_start_ = false;
  bool exited_ = false;
};

}  // namespace remesh::ctl
