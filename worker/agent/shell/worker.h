// Worker: the daemon remesh-worker. It carries messages, time and what happens
// to the ranks to the pure core (worker/agent/core) and does what the core
// says, in order.
//
// Threads: one, which runs the loop and starts the ranks; ZeroMQ and PMIx have
// threads of their own inside.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/wire/channel.h"
#include "proto/wire/loop.h"
#include "worker/agent/core/agent.h"
#include "worker/agent/shell/address.h"
#include "worker/agent/shell/launcher.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {

struct WorkerOptions {
  std::string connect;  // tcp://HOST:PORT or a run directory
  int slots = 1;
  std::string name;       // "": from the host's name, unique on the host
  std::string host_name;  // "": the host's
  std::string job;        // "": of whatever coordinator answers
  std::string scratch;    // "": /tmp/remesh-<uid>
  std::string log;        // "": stderr, then RUN/logs/worker-NAME.log
  std::string interface;  // "": chosen
  std::string trainer;    // path of remesh-trainer
  std::string version;
};

class Worker {
 public:
  // Takes the name, cleans up after a predecessor, starts the PMIx server.
  // Blocks signals: call before anything starts a thread.
  static Result<std::unique_ptr<Worker>> make(WorkerOptions options);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Until the core says Exit; returns its code. The last message is in
  // exit_message().
  int run();
  const std::string& exit_message() const { return exit_message_; }
  const std::string& name() const { return options_.name; }

 private:
  explicit Worker(WorkerOptions options);
  Status start();
  Status claim_name();
  Status open_log();
  void log_to_run(const std::string& run_dir);

  void connect();
  void disconnect();
  void on_message();
  void on_directive(const pb::Directive& directive);
  void on_tick();
  void on_signal(int signal);
  void look_for_coordinator(int64_t now_ms);

  // Gives the core an event, now or after the one that it is at.
  void feed(Event event);
  // One overload for each alternative of Action.
  void act(const SendReport& action);
  void act(const SendFence& action);
  void act(const Spawn& action);
  void act(const KillRanks& action);
  void act(const TearDown& action);
  void act(const TakeInventory& action);
  void act(const CompleteFence& action);
  void act(const SetRequest& action);
  void act(const LogEvent& action);
  void act(const Exit& action);
  void refresh_states(int64_t now_ms);
  void remove_states();
  void send(pb::Envelope envelope);

  WorkerOptions options_;
  CoordinatorAddress coordinator_;
  std::shared_ptr<Logger> log_;
  bool logs_to_run_ = false;
  wire::Loop loop_{kIdleTickMs};
  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<wire::Client> client_;
  std::string address_;    // that client_ connects to
  bool waits_ = false;     // said that there is no coordinator yet
  int64_t heard_ms_ = 0;   // last directive, or last try of an address
  int64_t ticked_ms_ = 0;  // last Tick given to the core
  std::deque<Event> events_;
  bool feeding_ = false;
  uint64_t state_job_ = 0;  // whose states it keeps; 0: not known yet
  int64_t states_refreshed_ms_ = 0;
  States states_after_ = States::kKept;
  std::optional<int> exit_code_;
  std::string exit_message_;
  std::string foreign_job_;  // last one refused, to say it once

  static constexpr int kIdleTickMs = 50;
};

}  // namespace remesh::agent
