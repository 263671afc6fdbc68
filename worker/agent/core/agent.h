// Agent: everything a worker daemon decides, as a pure state machine.
//
// on(event, now) returns what the shell shall do, in order. No sockets, files,
// processes, clocks, threads here. The shell samples the ranks' boards and
// gives the samples with each Tick.
//
// What it keeps true: ranks of one generation at a time; never ranks of a
// generation below the highest one it was fenced at; QUIESCED is said only
// when every rank of the generation is reaped and its PMIx namespace is gone;
// the states told are those which are there, for no rank lives that could
// change them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::agent {

// ------------------------------------------------------------------ events

// What one rank's board and process show; the fields of pb::RankStatus that
// the shell can see, plus the steps popped from the ring.
struct RankSample {
  pb::RankStatus status;  // rank set; exit fields unset
  std::vector<pb::StepMetrics> steps;
};
// At least every report_every_ms() and soon after a board changed.
struct Tick {
  std::vector<RankSample> samples;
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
// Starting failed altogether (exec, PMIx, descriptors): in words.
struct SpawnFailed {
  int64_t generation = 0;
  int rank = -1;
  std::string error;
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
// Answer to TakeInventory, whose numbers it repeats.
struct InventoryTaken {
  uint64_t job = 0;
  int64_t generation = 0;
  std::vector<pb::StateHolding> holdings;
  std::vector<std::string> damaged;  // in words
};
// SIGTERM: leave after the current step, nothing lost. A second one: at once.
struct Terminate {};

using Event = std::variant<Tick, DirectiveReceived, FenceOutReceived,
                           LocalFence, RankStarted, SpawnFailed, RankExited,
                           TornDown, InventoryTaken, Terminate>;

// ----------------------------------------------------------------- actions

struct SendReport {
  pb::Report report;
};
struct SendFence {
  pb::FenceIn fence;
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
// All its ranks are reaped: fail open fences, deregister, delete scratch.
struct TearDown {
  int64_t generation = 0;
};
// No rank lives: list the job's states in shared memory. `generation` is the
// newest one that had ranks.
struct TakeInventory {
  uint64_t job = 0;
  int64_t generation = 0;
};
struct CompleteFence {
  int64_t generation = 0;
  int64_t index = 0;
  std::string blob;
};
// Put into every local rank's board.
struct SetRequest {
  uint32_t bits = 0;
  int64_t checkpoint_request = 0;
};
struct LogEvent {
  std::string event;
  std::string detail;
};
// What becomes of the job's states in shared memory.
enum class States {
  kKept,           // nobody has said that they are not needed
  kRemoved,        // this worker's
  kRemovedForAll,  // the job has ended: also those that killed workers left
};
struct Exit {
  int code = 0;
  std::string message;
  States states = States::kKept;
  uint64_t state_job = 0;  // of those; 0: not known
};

using Action =
    std::variant<SendReport, SendFence, Spawn, KillRanks, TearDown,
                 TakeInventory, CompleteFence, SetRequest, LogEvent, Exit>;

// ------------------------------------------------------------------- core

struct Options {
  std::string worker;
  uint64_t incarnation = 0;  // larger than any earlier life's
  std::string host;
  int pid = 0;
  int slots = 1;
  int cores = 1;
  uint64_t memory_bytes = 0;  // of the host; 0: not known
  std::string version;
};

class Agent {
 public:
  explicit Agent(Options options) : options_(std::move(options)) {}

  std::vector<Action> on(const Event& event, int64_t now_ms);

  // The shell ticks at least this often.
  int64_t report_every_ms() const { return report_every_ms_; }
  int64_t generation() const { return generation_; }
  pb::Report::State state() const { return state_; }
  bool exited() const { return exited_; }

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
  void handle(const Terminate& e);

  void obey();  // drives the state towards the newest directive
  void leave_alone();
  void fence_at(int64_t generation);
  void start_ranks();
  void kill_ranks();
  void settle();  // all ranks reaped: tear down
  void take_inventory();
  bool any_alive() const;
  bool all_saved() const;
  void absorb(const RankSample& sample);
  void drop_metrics();
  void push_request();
  void send_fences(bool all);
  void set_state(pb::Report::State state);
  void report();
  void exit_with(int code, const std::string& message, States states);
  template <typename A>
  void act(A action) {
    actions_.push_back(std::move(action));
  }

  Options options_;
  int64_t now_ms_ = 0;
  std::vector<Action> actions_;

  // The coordinator, as last heard.
  uint64_t epoch_ = 0;
  uint64_t directive_seq_ = 0;  // newest of that epoch
  std::optional<pb::Directive> directive_;
  int64_t directive_ms_ = -1;
  int64_t report_every_ms_ = 100;
  int64_t dead_after_ms_ = 2000;

  // The generation it is fenced at.
  int64_t generation_ = 0;
  pb::Report::State state_ = pb::Report::IDLE;
  std::optional<pb::Assignment> assignment_;
  int64_t ran_generation_ = 0;  // newest one started or given up

  // The ranks, from Spawn until TornDown (busy_), and their last state after.
  bool busy_ = false;
  bool killing_ = false;
  bool tearing_down_ = false;
  int64_t progress_ms_ = 0;  // some local rank did something
  int64_t ranks_generation_ = 0;
  std::map<int, pb::RankStatus> ranks_;
  std::map<int64_t, std::string> fences_;  // own contributions, by index
  std::map<int64_t, bool> fence_done_;
  int64_t fence_sent_ms_ = 0;
  SetRequest request_;
  int64_t request_base_ = 0;
  SetRequest sent_request_;
  int64_t sent_request_generation_ = 0;

  // The states in shared memory. What was asked for last, and the answer while
  // it holds.
  uint64_t state_job_ = 0;
  TakeInventory asked_;
  std::optional<InventoryTaken> inventory_;
  bool handed_over_ = false;  // asked the ranks to save nothing
  bool saved_alone_ = false;  // by ranks that stopped without a coordinator

  // Not acknowledged, of any generation: what was fenced may be gone back to.
  std::deque<pb::StepMetrics> metrics_;
  int64_t metrics_acked_ = 0;
  int64_t told_earlier_ms_ = 0;  // when those of fenced generations were
  std::string error_;
  bool leaving_ = false;
  int64_t leaving_ms_ = 0;
  uint64_t seq_ = 0;
  bool dirty_ = false;
  bool urgent_ = false;
  int64_t reported_ms_ = -1;
  uint64_t dropped_ = 0;
  bool exited_ = false;
};

}  // namespace remesh::agent
