// Cluster: a whole remesh cluster in one thread, from a seed.
//
// Real coordinator and agent cores; everything around them is simulated:
// clocks, a network that loses, delays, duplicates and reorders, processes that
// crash between any two actions, freeze and come back, ranks that die, stop or
// fail, a journal, a metrics file and checkpoints that survive. Training is a
// chain of hashes, so a step that is skipped, repeated or computed from a wrong
// state shows in its "loss".
//
// run() returns the first violated invariant, or "" for a clean run. The same
// seed and options give the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "worker/agent/core/agent.h"

namespace remesh::sim {

struct SimOptions {
  uint64_t seed = 1;
  bool trace = false;        // print what happens to stdout
  int64_t fault_ms = 6'000;  // faults happen until then
  int64_t end_ms = 120'000;  // the job must be done by then
};

struct SimStats {
  int64_t end_ms = 0;
  int64_t generations = 0;
  int64_t steps = 0;
  int64_t faults = 0;
  int64_t messages = 0;
  int64_t from_memory = 0;  // generations
  int64_t lost_steps = 0;   // made again
  int64_t gaps = 0;         // in the record of steps
  int64_t hand_overs = 0;
  // Of every action of the coordinator, with its time: two builds that print
  // the same digest made the same decisions. The second leaves out sentences
  // (reasons, causes, details), so that wording can change.
  uint64_t digest = 0;
  uint64_t digest_of_decisions = 0;
};

class Cluster {
 public:
  explicit Cluster(const SimOptions& options);
  ~Cluster();
  std::string run();
  const SimStats& stats() const { return stats_; }

 private:
  struct Worker;
  struct World;
  struct Rank;

  // ---- time
  void step_once();
  void check_leftovers();
  void at(int64_t delay_ms, std::function<void()> what);
  int64_t uniform(int64_t low, int64_t high);  // both included
  bool chance(double p);

  // ---- coordinator process
  void start_coordinator(bool resume = false);
  void crash_coordinator();
  void drive_coordinator(const core::Input& event);
  void coordinator_tick(uint64_t life);
  void do_action(const core::Action& action);
  void add_to_digest(const core::Action& action);
  core::CheckpointsScanned scan();
  void resume();

  // ---- worker processes
  Worker& add_worker();
  void start_worker(Worker& w);
  void crash_worker(Worker& w);
  void drive_worker(Worker& w, const agent::Event& event);
  void worker_tick(const std::string& name, uint64_t incarnation);
  void do_action(Worker& w, const agent::Action& action);
  agent::RankSample sample(Rank& r);

  // ---- network
  void deliver_to_coordinator(const std::string& from,
                              const core::Input& event);
  void arrive(const std::string& from, const core::Input& event);
  void when_awake(const core::Input& event);
  void ask(const pb::Command& command);
  void deliver_to_worker(const std::string& to, const agent::Event& event);
  bool network_eats();
  int64_t latency();

  // ---- training
  void spawn(Worker& w, const pb::Assignment& a);
  void rank_ends(Rank& r, int code, int signal, int64_t delay_ms);
  void reap(const std::string& worker, uint64_t incarnation, int64_t generation,
            int rank);
  void maybe_connect(World& world);
  void schedule_step(World& world);
  void finish_step(int64_t generation, int64_t step);
  void boundary(World& world);
  void save(World& world);
  bool intact(const World& world) const;
  // States in memory (states.cc).
  bool keeps_state() const { return job_.elastic().keep_state(); }
  void describe_states(World& world);
  void restore(int64_t generation);
  bool restore_from_memory(World& world);
  void cannot_restore(World& world);
  bool was_whole(const World& world, int64_t step) const;
  Rank* live_rank(const World& world, int rank);
  void begin_updates(World& world, int64_t step);
  void commit_rank(int64_t generation, int rank, int64_t step,
                   const pb::StepMetrics& m);
  void replicate(World& world, int rank, int64_t step, bool awaited);
  void said_committed(World& world, int rank, int64_t step);
  void hand_over(World& world);
  void lose_host(Worker& w);
  void lose_memory(Worker& w);
  void scale();
  void check_source(const pb::Durable& d);
  void check_source_is_there(const pb::Durable& d);
  bool tells_steps(const World& world, int rank) const;
  bool reporter_is_here(const World& world) const;
  void check_lost(const pb::Durable& d);
  void check_branch(const pb::StepMetrics& last, int64_t generation);
  void note_safe(int64_t generation, int64_t ms);
  uint64_t chain(int64_t step);

  // ---- faults
  void schedule_fault();
  void note_trouble(Worker& w, int64_t until);
  void random_fault();
  void ask_mesh();
  void heal();

  // ---- invariants
  std::vector<Rank*> live_ranks(Worker& w);
  bool healthy(const std::string& name) const;
  void check_quiet(int64_t generation);
  void check_life(const pb::Durable& d);
  void check_persist(const pb::Durable& d);
  void check_mesh(const pb::Durable& d);
  void check_directive(const pb::Directive& d);
  bool slots_suffice(const pb::JobStatus& status) const;
  void check_metrics(const pb::StepMetrics& m);
  void check_event(const pb::EventRecord& e);
  void check_heard(const pb::Report& r);
  void check_report(Worker& w, const pb::Report& r);
  void check_request(const Worker& w, const agent::SetRequest& q);
  void check_fence(const Worker& w, World& world,
                   const agent::CompleteFence& f);
  void violated(const std::string& what);
  void trace(const std::string& what);

  SimOptions options_;
  SimStats stats_;
  std::mt19937_64 rng_;
  int64_t now_ = 0;
  uint64_t order_ = 0;
  struct Timed {
    int64_t when;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Timed& o) const {
      return std::tie(when, order) > std::tie(o.when, o.order);
    }
  };
  std::vector<Timed> queue_;  // a heap, soonest first
  std::string violation_;

  // The network's mood in this run.
  double loss_ = 0;
  double duplicate_ = 0;
  int64_t max_latency_ms_ = 1;
  double crash_between_actions_ = 0;
  std::map<std::string, int64_t> partitioned_until_;
  std::map<std::string, int64_t> reconnected_at_;  // to a new coordinator

  // Survives crashes.
  pb::Job job_;
  std::optional<pb::Durable> journal_;
  std::vector<pb::StepMetrics> metrics_;
  struct Saved {
    uint64_t state;
    std::vector<pb::StepMetrics> recent;
    int64_t generation = 0;
    uint64_t tag = 0;
  };
  std::map<int64_t, Saved> checkpoints_;
  int64_t claimed_ = 0;  // the generation that goes on in their folder
  std::vector<uint64_t> chain_;

  std::unique_ptr<core::Coordinator> coordinator_;
  uint64_t coordinator_life_ = 0;
  int64_t coordinator_frozen_until_ = 0;
  bool done_ = false;
  int exit_code_ = -1;

  std::map<std::string, std::unique_ptr<Worker>> workers_;
  std::map<int64_t, std::unique_ptr<World>> worlds_;  // by generation
  // Participants' lives, by generation.
  std::map<int64_t, std::map<std::string, uint64_t>> planned_;
  std::map<int64_t, std::string> assignments_;  // serialized
  struct Start {
    int64_t ms = 0;              // when the coordinator let the ranks start
    std::set<std::string> lost;  // workers whose part of the source was gone
  };
  std::map<int64_t, Start> starts_;  // by generation
  bool faults_on_ = true;
  bool disk_full_ = false;
  uint64_t epoch_ = 0;  // newest journaled
  uint64_t epoch_life_ = 0;
  std::map<std::string, uint64_t> newest_heard_;  // by this coordinator
  bool inconclusive_ = false;
  bool forgot_ = false;  // the journal was lost once
  bool stop_ = false;    // `remesh stop` comes at some time
  int64_t newest_scanned_ = 0;
  size_t workers_a_host_ = 1;
  std::optional<geometry::ParamTable> table_;
  // The last finished step lies in the memory of that generation's workers
  // since then.
  int64_t safe_generation_ = 0;
  int64_t safe_ms_ = 0;
  int64_t forgotten_before_ = 0;    // older generations' states, by some ranks
  bool lost_since_record_ = false;  // finished steps are made again
  std::set<std::pair<int64_t, int64_t>> saved_steps_;  // generation, step
  std::set<int64_t> put_off_;  // generations whose change was put off
};

}  // namespace remesh::sim
