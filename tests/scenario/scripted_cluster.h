// ScriptedCluster: a simulated cluster (tests/sim/cluster.h) that obeys a
// scenario's commands, with a perfect network (in order, at once) and ranks
// that do exactly what the scenario says. Says in readable lines what the
// cores decide, and VIOLATED if they break an invariant of the simulator that
// holds for any faults.
//
// Time passes only in `time` and `step`; daemons tick every 50 ms. Ranks start
// and connect by themselves, and then wait for `step` or `commit`. What repeats
// (the same directive again, the same state reported again) is not printed.
//
// Single-threaded. One cluster a scenario; it owns everything in it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "tests/scenario/scenario_file.h"
#include "tests/sim/parts.h"

namespace remesh::scenario {

// " dp=2 tp=2".
std::string mesh_text(const pb::Mesh& mesh);

class ScriptedCluster : public sim::Cluster {
 public:
  // With the job of that command.
  explicit ScriptedCluster(const Command& job);
  // What happened, one line each ("ok" when nothing did); errors are the
  // scenario's own (unknown command, no such worker).
  Result<std::string> execute(const Command& command);
  // One line a command, for people who write scenarios.
  static std::string help();

 private:
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

  // Sentences about what happens.
  void note(const core::Action& action) override;
  void note(const Worker& w, const agent::Action& action) override;
  void say(const std::string& line) override;

  void tick_all();
  void pump();  // delivers messages until none is under way
  Result<Worker*> find_worker(const std::string& name, bool alive);
  Result<Rank*> find_rank(const std::string& number);
  std::vector<Rank*> ranks();  // of the live generation

  std::string output_;
  std::map<std::string, std::string> said_;  // last printed report of a worker
  std::map<std::string, std::string> told_;  // and directive
  std::optional<pb::Durable> backup_;
  int64_t live_ = 0;  // newest generation spawned
};

}  // namespace remesh::scenario
