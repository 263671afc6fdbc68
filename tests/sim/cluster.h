// Cluster: a complete remesh cluster in one thread, with one of two drivers:
// run() makes what happens from a seed, and ScriptedCluster (tests/scenario)
// obeys a text.
//
// The cores of coordinator and agent are real; everything around them is
// simulated: clocks; a network that loses, delays, duplicates and reorders
// messages; processes that crash between any two actions, or freeze and
// continue; ranks that die, stop or fail; a journal, a metrics log and
// checkpoints that survive crashes; and a disk that may stall. Training is a
// chain of hashes, so a step that is skipped, repeated or computed from a wrong
// state changes its "loss".
//
// run() returns the first violated invariant, or "" for a clean run. The same
// seed and options give the same run.
//
// A clean run does not prove that replies to commands are right, that commands
// take effect promptly, or how long a recovery takes (only that the job is done
// by end_ms); that generations, messages or journal entries are few or small;
// that back-off and the limits on failures work (tests/scenario covers them);
// anything about bytes on disk, in shared memory and in MPI, which either work
// or fail here as a unit; nor anything beyond 6 workers of 2 slots. A run ends
// early if the journal is lost and no process is left that knows its generation
// number (the seed is inconclusive) or if the job fails for a good reason.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "coordinator/server/wait.h"
#include "tests/sim/hostile.h"
#include "tests/sim/random.h"
#include "worker/agent/core/agent.h"

namespace remesh::sim {

struct SimOptions {
  uint64_t seed = 1;
  bool trace = false;        // print every event to stdout
  int64_t fault_ms = 6'000;  // faults happen until then
  int64_t end_ms = 120'000;  // the job must be done by then
  // Hostile messages at each tick of a daemon; -1: chosen by the seed. With
  // `calm` they are replaced by empty messages, which must not change the run.
  int hostile = -1;
  bool calm = false;
  // The sentences in the journal, reports and directives are others, which must
  // make no difference either.
  bool reword = false;
};

struct SimStats {
  int64_t end_ms = 0;
  int64_t generations = 0;
  int64_t steps = 0;
  int64_t faults = 0;
  int64_t messages = 0;
  int64_t hostile = 0;      // of the messages
  int64_t from_memory = 0;  // generations
  int64_t lost_steps = 0;   // steps computed again
  int64_t gaps = 0;         // in the metrics log
  int64_t handoffs = 0;
  // An invariant could not be checked, so the run ended early (invariants.cc).
  bool inconclusive = false;
  // Of every action of the coordinator, with its time: two builds that print
  // the same digest made the same decisions. The second leaves out sentences
  // (reasons, causes, details), so that wording can change.
  uint64_t digest = 0;
  uint64_t digest_of_decisions = 0;
};

class Cluster {
 public:
  explicit Cluster(const SimOptions& options);
  virtual ~Cluster();
  std::string run();
  const SimStats& stats() const { return stats_; }

 protected:
  // For a script: nothing fails, takes time or happens by itself unless the
  // script says so.
  explicit Cluster(pb::Job job);
  static constexpr int64_t kNever = int64_t{1} << 60;

  struct Worker;
  struct World;
  struct Rank;
  // What a script sees: each action before it takes effect, and sentences
  // about the ranks and about an older coordinator.
  virtual void note(const core::Action&) {}
  virtual void note(const Worker&, const agent::Action&) {}
  virtual void say(const std::string& line) { trace(line); }

  enum class Bad {
    kNone,
    kSpawn,
    kCrash,
    kCannot,
    kNoRoom,
    kNoSource,
    kDies,
    kSmall,
    kHangs,        // before the ranks connect
    kDiesLater,    // in the second step of each generation
    kUnreachable,  // from other hosts
  };

  // ---- time
  void step_once();
  void check_leftovers();
  void at(int64_t delay_ms, std::function<void()> what);
  // The same for the work of ranks, which takes no time in a script.
  void takes(int64_t ms, const std::function<void()>& what);
  // The same, but never in a script.
  void by_itself(int64_t delay_ms, const std::function<void()>& what);
  // Unless the worker has ended meanwhile.
  void later(const Worker& w, int64_t delay_ms,
             const std::function<void(Worker&)>& what);
  int64_t uniform(int64_t a, int64_t b) { return random_.uniform(a, b); }
  bool chance(double p) { return random_.chance(p); }

  // ---- coordinator process
  void start_coordinator(bool resume = false);
  void crash_coordinator();
  void drive_coordinator(const core::Input& event);
  bool waits_to_settle(const core::Input& event) const;
  void settle_later();
  void settle(uint64_t life);
  void perform(const std::vector<core::Action>& actions);
  void coordinator_tick(uint64_t life);
  void put_into_journal(const pb::Durable& d);
  void do_action(const core::Action& action);
  void add_to_digest(const core::Action& action);
  core::CheckpointsScanned scan();
  void roll_journal_back();
  int64_t sync_metrics();
  // Two coordinators at once (rival.cc).
  void start_rival();
  void end_rival(const std::string& why);
  void rival_tick();
  void tell_rival(const std::string& from, const core::Input& event);
  std::string refuses_rival(const core::Action& action) const;
  bool finds_lines_of_rival();
  void drive_rival(const core::Input& event);
  void cut_metrics(size_t lines);
  void lose_unsynced_metrics();
  void resume();

  // ---- the coordinator's disk and what waits for it (disk.cc)
  void choose_disk();
  void schedule_disk_fault();
  void break_disk();
  void slow_disk();
  void repair_disk();
  void when_disk_answers(std::function<void()> what);
  void write(std::function<void()> effect);
  void write_one();
  void then(std::function<void()> act);
  void deliver_written();
  bool coordinator_runs() const;
  void lose_unwritten();
  core::Tick tick_of_disk();
  void note_place(const pb::Report& r);
  void hold(const pb::Directive& d);
  void poll_mail();

  // ---- worker processes
  Worker& add_worker();
  void start_worker(Worker& w);
  void stop_daemon(Worker& w);
  void end_daemon(Worker& w);
  void crash_worker(Worker& w);
  void drive_worker(Worker& w, const agent::Event& event);
  void worker_tick(Worker& w);
  void tick(Worker& w);
  void do_action(Worker& w, const agent::Action& action);
  void tear_down(Worker& w, int64_t generation);
  void measure_hardware(const Worker& w);
  agent::RankSample sample(Rank& r);

  // ---- network
  void send(const std::string& worker, bool lost,
            const std::function<void()>& arrives);
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
  void spawn_fails(Worker& w, World& world);
  void rank_ends(Rank& r, int code, int signal, int64_t delay_ms);
  void rank_fails(Rank& r, int code, int signal, int64_t delay_ms);
  void reap(Worker& w, int64_t generation, int rank);
  void maybe_connect(World& world);
  void schedule_step(World& world);
  void finish_step(int64_t generation, int64_t step);
  void record_step(World& world, int64_t step);
  void boundary(World& world);
  void save_and_end(World& world, bool must);
  void save(World& world, int64_t step);
  bool intact(const World& world) const;
  // States in memory (states.cc).
  bool keeps_state() const { return job_.elastic().keep_state(); }
  void describe_states(World& world);
  void restore(int64_t generation);
  bool restore_from_memory(World& world);
  void cannot_restore(World& world, const std::string& why);
  bool was_complete(const World& world, int64_t step) const;
  std::set<std::string> hosts_of(const World& world) const;
  Worker& worker_of(const World& world, int rank) const;
  Rank* live_rank(const World& world, int rank) const;
  std::vector<Rank*> ranks_of(const World& world) const;  // that live
  void ranks_say(const World& world, const std::string& what);
  void begin_updates(World& world, int64_t step);
  void commit_rank(int64_t generation, int rank, int64_t step);
  void commit_state(World& world, int rank, int64_t step);
  void replicate(World& world, int rank, int64_t step, bool awaited);
  void report_committed(World& world, int rank, int64_t step);
  void end_for_handoff(World& world);
  void lose_host(Worker& w);
  void lose_memory(Worker& w);
  void scale();
  void check_source(const pb::Durable& d);
  void check_source_is_there(const pb::Durable& d);
  void publish(World& world, Rank& r, int64_t step);
  bool reporter_is_here(const World& world, int64_t step) const;
  void check_lost(const pb::Durable& d);
  void check_branch(const pb::StepMetrics& last, int64_t generation);
  void note_safe(int64_t generation, int64_t ms);
  uint64_t chain(int64_t step);
  double step_seconds(const pb::Mesh& mesh) const;

  // ---- faults
  void choose_bad_host();
  void choose_many_bad_hosts();
  void choose_cut_off();
  bool choose_outage();
  bool in_outage(const std::string& host) const {
    return now_ < outage_until_ && (outage_.empty() || outage_ == host);
  }
  void choose_link_of_many();
  void cut_link_at(int64_t delay_ms);
  void check_link_search(const pb::EventRecord& e);
  void check_room(const pb::EventRecord& e);
  void make_calm();
  void choose_bad_link();
  bool cut_apart(const World& world) const;
  void choose_bad_place();
  void check_failed(const std::string& cause);
  void check_bad_place(const pb::EventRecord& e);
  bool connects_badly(Worker& w, World& world);
  Bad bad_of(const std::string& host, const std::string& worker = "") const;
  bool start_badly(Worker& w, World& world);
  void cannot_read(Rank& r);
  void end_badly(World& world);
  bool others_could_run() const;
  bool good_workers_suffice() const;
  void schedule_fault();
  void note_trouble(Worker& w, int64_t until);
  std::vector<Worker*> running() const;
  void random_fault();
  void send_away(Worker& w);
  void ask_mesh();
  void heal();

  // ---- hostile peers
  void attack_coordinator();
  void attack_worker(Worker& w);
  void upgrade(Worker& w);
  void finish_upgrade();
  // ---- who is alive and who is who (liveness.cc)
  void schedule_liveness_fault();
  void liveness_fault();
  void cut_coordinator_off(int64_t until, bool closes);
  void lose_connection(const std::string& name);
  void delay_kills(Worker& w);
  int64_t time_on(const Worker& w) const;
  void turn_clock(Worker& w);
  void pretend_to_be(const Worker& w);
  void pretend(const std::shared_ptr<agent::Agent>& agent,
               const std::string& name, int64_t until);
  void note_impostor(const pb::Report& r);
  uint64_t new_incarnation(Worker& w);
  void begin_finalize(Rank& r, int64_t delay_ms);
  void end_finalize(Worker& w, int64_t generation);
  void excuse_slow_fences();
  bool waits_for_fence(const World& world) const;
  void check_lost_worker(const pb::EventRecord& e);
  bool is_known(const std::string& worker) const;
  bool knows_hosts() const;

  // ---- invariants
  std::vector<Rank*> live_ranks(Worker& w);
  bool considers_live(const Worker& w) const;  // the coordinator
  bool healthy(const std::string& name) const;
  void check_quiet(int64_t generation);
  void check_life(const pb::Durable& d);
  void check_persist(const pb::Durable& d);
  void check_mesh(const pb::Durable& d);
  void check_saved_is_used(const pb::Durable& d);
  bool abandoned(int64_t step, int64_t generation) const;
  void note_written(const pb::Durable& d);
  void check_directive(const pb::Directive& d);
  void check_sent(const pb::Directive& d);
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
  template <typename T, typename... Ts>
  void violated(fmt::format_string<T, Ts...> format, T&& first, Ts&&... rest) {
    violated(
        fmt::format(format, std::forward<T>(first), std::forward<Ts>(rest)...));
  }

  const bool scripted_ = false;
  SimOptions options_;
  SimStats stats_;
  Random random_;
  std::mt19937_64 hostile_rng_;
  Random later_random_;  // of faults that were added later
  int hostile_ = 0;
  Random upgrade_random_;
  bool upgrades_ = false;  // workers return with another build
  std::map<std::pair<std::string, uint64_t>, std::string>
      builds_;  // by incarnation
  Overheard overheard_;
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
  std::vector<Timed> queue_;  // a heap, earliest first
  std::string violation_;

  // The network of this run.
  double loss_ = 0;
  double duplicate_ = 0;
  int64_t max_latency_ms_ = 1;
  double crash_between_actions_ = 0;
  std::map<std::string, int64_t> partitioned_until_;
  Random liveness_random_;
  std::map<std::string, int64_t> mute_until_;  // its messages are lost
  std::map<std::string, int64_t> deaf_until_;  // messages to it are lost
  std::map<std::string, int64_t> heard_ms_;    // by this coordinator
  std::map<std::string, int64_t> connection_lost_ms_;
  std::map<std::string, int64_t> reconnected_at_;  // to a new coordinator

  // In some runs ranks fail to start on one host, until it is repaired. In
  // others on several hosts, with few other faults, so that the limits on
  // failures can be those of a real job.
  Random host_random_;
  std::map<std::string, Bad> bad_hosts_;
  std::map<std::string, Bad> bad_workers_;
  std::string bad_place_;  // the only one, a host or worker (bad_places.cc)
  bool all_wait_ = false;  // also the rank that hangs
  int64_t place_failures_ = 0;
  bool calm_ = false;
  bool cut_off_ =
      false;  // except that the coordinator is cut off from all workers once
  int64_t outage_until_ = 0;  // of the storage, since it began
  std::string outage_;        // the only host; "": all, and the coordinator's
  int64_t num_workers_ = 0;
  bool repaired_ = false;  // when the faults stop
  // In others the ranks of two hosts can no longer reach each other.
  std::pair<std::string, std::string> bad_link_;
  std::set<std::pair<std::string, std::string>> cut_links_;
  int64_t hangs_ = 0;
  std::map<std::string, int64_t> joined_ms_;  // by host
  int64_t finishing_ms_ = 0;
  bool planned_stop_ = false;  // and no mesh was planned since

  // In some runs the coordinator processes messages in batches.
  Random batch_random_;
  int64_t max_batch_ms_ = 0;
  bool settling_ = false;

  // The coordinator's disk, with the run directory.
  enum class Disk { kWorks, kStalled, kFull, kSlow };
  Random disk_random_;
  Disk disk_ = Disk::kWorks;
  int64_t broke_ms_ = 0;
  int64_t probed_ms_ = 0;
  // Writes that wait for the disk, as in server::Outbox; the first one is in
  // progress. Empty while the disk works.
  std::deque<std::function<void()>> unwritten_;
  uint64_t given_ = 0, written_ = 0;  // numbers of writes
  server::Wait first_waits_, call_lasts_;
  std::deque<std::function<bool()>> acts_;  // each after all earlier writes
  std::optional<pb::Durable> decided_;      // the newest queued, or journal_
  bool asks_auto_ = false;                  // the last mesh asked for was none
  std::optional<pb::Durable> adopted_;      // journal_ when it started
  size_t unwritten_lines_ = 0;              // the last of metrics_
  // Directives to its workers, as in server::DirectiveSender.
  struct Place {
    uint64_t incarnation = 0;
    std::optional<pb::Directive> sent, held;
    int64_t sent_ms = 0;
    uint64_t held_after = 0;
  };
  void release(Place& place);
  void send_again(Place& place);
  std::map<std::string, Place> places_;  // by worker
  uint64_t mail_seq_ = 0;
  std::set<int64_t> ran_;  // generations journaled as RUNNING
  bool resuming_ = false;  // and not journaled yet

  // Survives crashes.
  pb::Job job_;
  std::optional<pb::Durable> journal_;
  size_t synced_lines_ = 0;  // of metrics_, which survive a crash of the host
  std::vector<bool> after_loss_;  // by line: whether steps were lost before it
  int64_t next_sync_ms_ = 0;
  std::deque<pb::Durable> backups_;  // of the journal, since its last end
  std::vector<pb::StepMetrics> metrics_;
  struct Saved {
    uint64_t state;
    std::vector<pb::StepMetrics> recent;
    int64_t generation = 0;
    uint64_t tag = 0;
    int64_t ms = 0;  // when it was committed
  };
  std::map<int64_t, Saved> checkpoints_;
  int64_t claimed_ = 0;          // the generation that claimed their folder
  std::set<int64_t> damaged_;    // of them
  int64_t listing_ms_ = kNever;  // the newest they are
  std::set<std::pair<std::string, int64_t>> spoiled_;  // in whose memory
  std::vector<uint64_t> chain_;

  std::unique_ptr<core::Coordinator> coordinator_;
  uint64_t coordinator_life_ = 0;
  int64_t restarted_ms_ = -core::kReconnectSlackMs;
  size_t lines_ = 0;  // of metrics_, as this coordinator wrote them
  // An older coordinator that has lost its lock, and when it notices at the
  // latest.
  std::unique_ptr<core::Coordinator> rival_;
  size_t rival_lines_ = 0;
  int64_t rival_frozen_until_ = 0;
  int64_t rival_ends_ms_ = 0;
  std::vector<core::Input> rival_mail_;  // while there was no other one
  std::set<std::string> rival_hears_;    // these workers for certain
  std::set<std::string> lost_alone_;  // workers, when only one host was known
  int64_t coordinator_frozen_until_ = 0;
  bool done_ = false;
  int exit_code_ = -1;

  std::map<std::string, std::unique_ptr<Worker>> workers_;
  std::map<int64_t, std::unique_ptr<World>> worlds_;  // by generation
  // Incarnations of the participants, by generation.
  std::map<int64_t, std::map<std::string, uint64_t>> planned_;
  std::map<int64_t, std::string> assignments_;  // serialized
  struct Start {
    int64_t ms = 0;              // when the coordinator started the ranks
    std::set<std::string> lost;  // workers whose part of the source was gone
  };
  std::map<int64_t, Start> starts_;  // by generation
  bool faults_on_ = true;
  bool disk_full_ = false;
  uint64_t epoch_ = 0;  // newest journaled
  uint64_t epoch_life_ = 0;
  // By this coordinator: the incarnation, and when it was heard.
  std::map<std::string, std::pair<uint64_t, int64_t>> newest_heard_;
  bool inconclusive_ = false;
  bool rightly_failed_ =
      false;             // the job failed for a good reason, which ends the run
  bool forgot_ = false;  // the journal was once lost or rolled back
  // Newest committed checkpoint that was reported to the coordinator.
  int64_t told_saved_ = 0;
  bool stop_ = false;  // `remesh stop` will be requested
  int64_t newest_scanned_ = 0;
  size_t workers_a_host_ = 1;
  std::optional<geometry::ParamTable> table_;
  // Since this time the last finished step is in the memory of that
  // generation's workers.
  int64_t safe_generation_ = 0;
  int64_t safe_ms_ = 0;
  int64_t forgotten_before_ =
      0;  // some ranks have removed the states of older generations
  bool lost_since_record_ = false;  // finished steps are being computed again
  std::set<std::pair<int64_t, int64_t>> saved_steps_;  // generation, step
  std::set<int64_t> put_off_;  // generations whose change was put off
};

}  // namespace remesh::sim
