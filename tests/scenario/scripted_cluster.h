// ScriptedCluster: a real coordinator core and real agent cores that obey a
// scenario's commands, with a perfect network (in order, at once) and ranks
// that do exactly what the scenario says. Says in readable lines what the
// cores decide.
//
// Time passes only in `time` and `step`; daemons tick every 50 ms. Ranks start
// and connect by themselves, and then wait for `step` or `commit`. What repeats
// (the same directive again, the same state reported again) is not printed.
//
// Single-threaded. One cluster a scenario; it owns everything in it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "proto/base/status.h"
#include "tests/scenario/scenario_file.h"
#include "tests/sim/memory.h"
#include "worker/agent/core/agent.h"

namespace remesh::scenario {

// " dp=2 tp=2".
std::string mesh_text(const pb::Mesh& mesh);

class ScriptedCluster {
 public:
  // What happened, one line each ("ok" when nothing did); errors are the
  // scenario's own (unknown command, no such worker).
  Result<std::string> execute(const Command& command);
  // One line a command, for people who write scenarios.
  static std::string help();

 private:
  struct Rank {
    int rank = 0;
    bool alive = true;
    bool stopped = false;  // SIGSTOP
    bool stuck = false;    // makes no progress, process running
    uint64_t progress = 1;
    int64_t committed = 0;
    int64_t checkpoint = -1;
    std::string checkpoint_error;
    int64_t declined_stops = 0;
    bool declined = false;  // answered the request at hand by going on
    agent::SetRequest request;
    std::vector<pb::StepMetrics> ring;
  };
  struct Worker {
    std::string name;
    std::string host;
    int slots = 1;
    uint64_t incarnation = 0;
    std::unique_ptr<agent::Agent> agent;  // null: dead
    bool frozen = false;                  // SIGSTOP of the daemon
    bool cut = false;                     // network loses everything
    bool held = false;                    // network delays everything
    std::deque<core::Input> out;          // while held
    std::deque<agent::Event> in;          // while held or frozen
    int64_t generation = 0;               // of `ranks`
    std::map<int, Rank> ranks;
    int64_t room = -1;           // free shared memory; -1: it does not say
    sim::StateMemory memory;     // of its host: outlives its daemon
    std::set<int64_t> fences;    // completed, of `generation`
    std::string spawn_error;     // the next starts fail
    int64_t spawn_failures = 0;  // so many
    std::string said;            // last printed report and directive
    std::string told;
  };
  using Handler = Status (ScriptedCluster::*)(const Command&);
  struct Verb {
    Handler handler;
    const char* help;
  };
  static const std::map<std::string, Verb>& verbs();

  // Commands.
  Status job(const Command& c);
  Status coordinator(const Command& c);
  Status backup(const Command& c);
  Status freeze_coordinator(const Command& c);
  Status thaw_coordinator(const Command& c);
  Status kill_coordinator(const Command& c);
  Status worker(const Command& c);
  Status kill(const Command& c);
  Status network(const Command& c);
  Status link(const Command& c);
  Status freeze(const Command& c);
  Status term(const Command& c);
  Status user(const Command& c);
  Status time(const Command& c);
  Status step(const Command& c);
  Status commit(const Command& c);
  Status rank(const Command& c);
  Status disk(const Command& c);
  Status room(const Command& c);
  Status scan_result(const Command& c);
  Status report(const Command& c);
  Status directive(const Command& c);
  Status fence(const Command& c);
  Status status(const Command& c);

  // Machinery.
  void say(const std::string& line);
  void tick();
  void tick_worker(Worker& w);
  void pump();  // delivers messages until none is under way
  void start_coordinator(bool resume);
  void drive(const core::Input& event);
  void drive_older(const core::Input& event);
  std::string refuses_older(const core::Action& action) const;
  void drive(Worker& w, const agent::Event& event);
  void act(const core::Action& action);
  void act(Worker& w, const agent::Action& action);
  void to_coordinator(Worker& w, core::Input event);
  void to_worker(const std::string& name, agent::Event event);
  void to_worker(const core::SendDirective& s);  // gives it its number
  void spawn(Worker& w, const pb::Assignment& a);
  void complete_fence(Worker& w, const agent::CompleteFence& f);
  void end_rank(Worker& w, Rank& r, int code, int signal,
                const std::string& error, double time);
  void reap_killed(Worker& w);
  bool kills_slowly(const Worker& w) const {
    return slow_kill_ && (slow_kill_of_.empty() || slow_kill_of_ == w.name);
  }
  agent::RankSample sample(Rank& r);
  core::CheckpointsScanned scan() const;
  Result<Worker*> find_worker(const std::string& name, bool alive);
  Result<std::pair<Worker*, Rank*>> find_rank(const std::string& number);
  std::vector<std::pair<Worker*, Rank*>> world();
  bool cut_apart();
  void commit_step(Worker& w, Rank& r, int64_t step);
  // States in memory (states.cc).
  bool keeps_state() const { return job_.elastic().keep_state(); }
  pb::StateHolding holding(int rank, int64_t step, bool replica) const;
  void restore_states();
  void commit_state(Worker& w, int rank, int64_t step);
  void replicate(int64_t step, bool always = false);
  void forget_older_states();
  void boundary(int64_t step);
  void save(int64_t step);

  int64_t now_ = 0;
  std::string output_;
  pb::Job job_;
  std::unique_ptr<core::Coordinator> coordinator_;
  uint64_t directive_seq_ = 0;
  // One that was stopped when the other was started, its mail, the length of
  // metrics.jsonl as it knows it, and the workers it hears again.
  std::unique_ptr<core::Coordinator> older_;
  std::deque<core::Input> older_mail_;
  size_t older_lines_ = 0;
  std::set<std::string> older_hears_;
  std::optional<pb::Durable> journal_, backup_;
  std::vector<pb::StepMetrics> metrics_;
  std::map<int64_t, std::vector<pb::StepMetrics>> checkpoints_;
  // What a listing shows instead, while it is late.
  std::optional<std::map<int64_t, std::vector<pb::StepMetrics>>> listed_;
  std::set<int64_t> damaged_;
  std::set<std::pair<std::string, int64_t>> spoiled_;  // in whose memory
  std::set<std::pair<std::string, std::string>> cut_links_;
  bool disk_full_ = false;
  bool slow_kill_ = false;
  std::string slow_kill_of_;  // only of this worker; "": of all
  std::map<int64_t, pb::StepMetrics> computed_;  // by the live generation
  int64_t live_ = 0;                             // newest generation spawned
  pb::Assignment assignment_;                    // of it
  std::map<std::string, Worker> workers_;
  std::deque<std::function<void()>> messages_;
};

}  // namespace remesh::scenario
