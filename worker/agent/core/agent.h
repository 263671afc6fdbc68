// Agent: every decision of a worker daemon, as a pure state machine.
//
// on(event, now) returns the actions that the shell must execute, in order.
// There are no sockets, files, processes, clocks or threads here. The shell
// samples the ranks' boards and passes the samples with each Tick.
//
// Invariants:
//   - Ranks of at most one generation run at a time, and never ranks of a
//     generation below the highest one that the worker was fenced at.
//   - The agent reports QUIESCED only after every rank of the generation was
//     reaped and its PMIx namespace is gone.
//   - The inventory of states that it reports is current: it is taken and sent
//     only while no rank lives that could change them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::agent {

// ------------------------------------------------------------------ events

// A sample of one rank's board and process: the fields of pb::RankStatus that
// the shell can see, and the steps popped from the ring.
struct RankSample {
  pb::RankStatus status;  // rank set; exit fields unset
  std::vector<pb::StepMetrics> steps;
};
// At least every report_every_ms(), and soon after a board changed.
struct Tick {
  std::vector<RankSample> samples;
  std::optional<uint64_t> state_room = {};  // for Report.state_room
};
struct DirectiveReceived {
  pb::Directive directive;
};
struct FenceOutReceived {
  pb::FenceOut fence;
};
// All local ranks have entered PMIx fence number `index` of the generation.
struct LocalFence {
  int64_t generation = 0;
  int64_t index = 0;
  std::string blob;
};
struct RankStarted {
  int64_t generation = 0;
  int rank = 0;
  int pid = 0;
};
// The ranks could not be started (exec, PMIx, descriptors).
struct SpawnFailed {
  int64_t generation = 0;
  int rank = -1;
  std::string error;
  bool permanent = false;  // another try would fail the same way
};
// A rank was reaped. `sample` is its board's last state.
struct RankExited {
  int64_t generation = 0;
  int rank = 0;
  int exit_code = 0;
  int signal = 0;  // 0: exited by itself
  double exit_time = 0;
  std::string last_log;
  RankSample sample;
};
// Answer to TearDown: PMIx namespace and scratch of the generation are gone.
struct TornDown {
  int64_t generation = 0;
};
// Answer to TakeInventory; repeats its `job` and `generation`. Again, when
// states were found to be gone.
struct InventoryTaken {
  uint64_t job = 0;
  int64_t generation = 0;
  std::vector<pb::StateHolding> holdings;
  std::vector<std::string> damaged;  // error messages
};
// Answer to MeasureHardware: a description or, if that is "", why there is
// none.
struct HardwareMeasured {
  std::string description;
  std::string error;
};
// The coordinator at the address does not take this worker. RETRY: the worker
// keeps reporting. OTHER_JOB: it exits, but once it has had a directive it
// waits for its own coordinator. PERMANENT: its ranks save and stop, and it
// exits.
struct Refused {
  std::string reason;
  pb::Refusal::Kind kind = pb::Refusal::UNKNOWN;
};
// The run of the worker has ended and has no coordinator.
struct RunEnded {
  std::string reason;
  bool done = false;  // every step is made and saved: no state is needed
};
// SIGTERM: leave after the current step without losing work. A second one:
// leave immediately.
struct Terminate {};

using Event =
    std::variant<Tick, DirectiveReceived, FenceOutReceived, LocalFence,
                 RankStarted, SpawnFailed, RankExited, TornDown, InventoryTaken,
                 HardwareMeasured, Refused, RunEnded, Terminate>;

// ----------------------------------------------------------------- actions

// To the coordinator, except for the job, which the shell knows.
struct Send {
  pb::Envelope message;
};
// Register the namespace and start this worker's ranks of the assignment.
// Answers: RankStarted for each, or SpawnFailed once.
struct Spawn {
  pb::Assignment assignment;
  uint64_t state_job = 0;  // number of their states; 0: keep none
};
// SIGKILL every live rank of the generation (idempotent).
struct KillRanks {
  int64_t generation = 0;
};
// All ranks are reaped: fail open fences, deregister the namespace, delete the
// generation's scratch files.
struct TearDown {
  int64_t generation = 0;
};
// No rank lives: list the job's states in shared memory. `generation` is the
// newest one that had ranks here.
struct TakeInventory {
  uint64_t job = 0;
  int64_t generation = 0;
};
// Find out what a core of this host does. Answer: HardwareMeasured.
struct MeasureHardware {};
struct CompleteFence {
  int64_t generation = 0;
  int64_t index = 0;
  std::string blob;
};
// Write these into the board of every local rank.
struct SetRequest {
  uint32_t bits = 0;
  int64_t checkpoint_request = 0;
  friend bool operator==(const SetRequest&, const SetRequest&) = default;
};
struct LogEvent {
  std::string event;
  std::string detail;
};
// What happens to the job's states in shared memory when the worker exits.
enum class States {
  kKept,           // they may still be needed
  kRemoved,        // those of this worker
  kRemovedForAll,  // the job has ended: also those left by killed workers
};
struct Exit {
  int code = 0;
  std::string message;
  States states = States::kKept;
  uint64_t state_job = 0;  // job of the states; 0: unknown
};

using Action =
    std::variant<Send, Spawn, KillRanks, TearDown, TakeInventory,
                 MeasureHardware, CompleteFence, SetRequest, LogEvent, Exit>;

// ------------------------------------------------------------------- core

class Agent {
 public:
  // `about` is what every report says of the worker. Its incarnation is larger
  // than any earlier one.
  explicit Agent(pb::Report about) : about_(std::move(about)) {}

  std::vector<Action> on(const Event& event, int64_t now_ms);

  // The shell must tick at least this often.
  int64_t report_every_ms() const { return report_every_ms_; }
  int64_t generation() const { return generation_; }
  pb::Report::State state() const { return state_; }
  bool exited() const { return exited_; }
  // Whether it is for this life of the worker.
  bool is_mine(const pb::Directive& d) const;
  // Whether it starts no ranks any more: SIGTERM, or the coordinator says so.
  bool ends() const {
    return leaving_ ||
           (directive_ && (directive_->goal() == pb::Directive::LEAVE ||
                           directive_->goal() == pb::Directive::SHUTDOWN));
  }

 private:
  void handle(const Tick& e);
  void handle(const DirectiveReceived& e);
  void handle(const FenceOutReceived& e);
  void handle(const LocalFence& e);
  void handle(const RankStarted& e);
  void handle(const SpawnFailed& e);
  void handle(const RankExited& e);
  void handle(const TornDown& e);
  void handle(const InventoryTaken& e);
  void handle(const HardwareMeasured& e);
  void handle(const Refused& e);
  void handle(const RunEnded& e);
  void handle(const Terminate& e);

  void reconcile();  // drives the state towards the newest directive
  void leave();
  void leave_without_coordinator();
  void fence_at(int64_t generation);
  void start_ranks();
  void kill_ranks();
  void settle();  // all ranks reaped: tear down
  void take_inventory();
  bool any_alive() const;
  bool all_saved() const;
  void absorb(const RankSample& sample);
  void note_origin();
  void push_request();
  void send_fences(bool all);
  void set_state(pb::Report::State state);
  void report();
  void exit_with(int code, const std::string& message, States states);
  template <typename A>
  void act(A action) {
    actions_.emplace_back(std::move(action));
  }

  pb::Report about_;
  int64_t now_ms_ = 0;
  int64_t ticked_ms_ = -1;
  std::vector<Action> actions_;

  // The newest directive of the coordinator.
  uint64_t epoch_ = 0;
  uint64_t directive_seq_ = 0;  // newest seq of that epoch
  std::optional<pb::Directive> directive_;
  int64_t directive_ms_ = -1;
  int64_t report_every_ms_ = 100;
  int64_t dead_after_ms_ = 2000;

  std::optional<HardwareMeasured> hardware_;
  bool measuring_ = false;

  // The generation that the worker is fenced at.
  int64_t generation_ = 0;
  pb::Report::State state_ = pb::Report::IDLE;
  std::optional<pb::Assignment> assignment_;
  int64_t ran_generation_ = 0;  // newest one started or abandoned

  // The ranks from Spawn until TornDown (busy_ is true), and their last state
  // afterwards.
  bool busy_ = false;
  bool killing_ = false;
  bool tearing_down_ = false;
  int64_t progress_ms_ = 0;  // newest progress of any local rank
  int64_t ranks_generation_ = 0;
  std::map<int, pb::RankStatus> ranks_;
  // Own contributions, by index; until the next ranks start.
  std::map<int64_t, std::string> fences_;
  std::map<int64_t, bool> fence_done_;
  int64_t fence_sent_ms_ = 0;
  bool stops_alone_ = false;  // without a coordinator
  int64_t request_base_ = 0;
  SetRequest sent_request_;
  int64_t sent_request_generation_ = 0;

  // The states in shared memory: the last inventory requested, and its result
  // while that is valid.
  uint64_t state_job_ = 0;
  TakeInventory asked_;
  std::optional<InventoryTaken> inventory_;
  std::optional<uint64_t> state_room_;
  bool handoff_requested_ = false;  // the ranks stop without saving
  // The ranks stopped without a coordinator and saved.
  bool saved_alone_ = false;

  // Unacknowledged metrics of any generation: recovery may return to a state of
  // an older generation.
  std::deque<pb::StepMetrics> metrics_;
  int64_t metrics_acked_ = 0;
  std::deque<pb::Branches::Origin> origins_;  // note_origin()
  int64_t older_sent_ms_ = 0;  // metrics of older generations last reported
  // How it exits when it leaves without a coordinator.
  std::pair<int, std::string> leave_exit_ = {
      0, "left; the coordinator did not answer"};
  bool leaving_ = false;
  int64_t leaving_ms_ = 0;
  int64_t interrupted_ms_ = -1;  // first SIGTERM
  uint64_t seq_ = 0;
  bool dirty_ = false;
  bool urgent_ = false;
  int64_t reported_ms_ = -1;
  bool exited_ = false;
};

}  // namespace remesh::agent
