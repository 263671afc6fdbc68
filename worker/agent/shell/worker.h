// Worker: the daemon remesh-worker. It passes messages, ticks and rank events
// to the pure core (worker/agent/core) and executes the actions that the core
// returns, in order.
//
// Threads: one, which runs the loop and starts the ranks. ZeroMQ and PMIx have
// internal threads.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/background.h"
#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/wire/channel.h"
#include "proto/wire/key_choice.h"
#include "proto/wire/loop.h"
#include "worker/agent/core/agent.h"
#include "worker/agent/core/silence.h"
#include "worker/agent/shell/address.h"
#include "worker/agent/shell/launcher.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {

struct WorkerOptions {
  std::string connect;  // tcp://HOST:PORT or a run directory
  int slots = 1;
  std::string name;       // "": derived from the host name, unique on the host
  std::string host_name;  // "": from gethostname()
  std::string job;        // "": the job of the coordinator that answers
  std::string scratch;    // "": /tmp/remesh-<uid>
  // Folder in `scratch`, unique on the host; "": the name of the worker.
  std::string scratch_name;
  std::string state_folder;  // a tmpfs for the states; "": /dev/shm
  std::string log;           // "": stderr, then RUN/logs/worker-NAME.log
  std::string interface;     // "": chosen automatically
  std::string mpi_ports;     // FIRST-LAST; "": any
  int wireguard = -1;        // UDP port, 0: any; < 0: no WireGuard
  // File of the worker's key, or of the job secret; "": that in the run
  // directory. The coordinator's public key, or a file with it; "": that in the
  // run directory, or in the key file.
  std::string key;
  std::string server_key;
  bool no_auth = false;
  std::string trainer;  // path of remesh-trainer
};

using Keys = Result<std::optional<wire::ClientKeys>>;
struct Lookup {
  std::optional<RunLookup> run;  // looked for only after a silence
  Keys keys = unavailable("not read yet");
};

// The way to a coordinator, which takes a name server to find.
struct Route {
  bool only_ipv6 = false;
  std::string network;  // network_towards()
};

class Worker {
 public:
  // Claims the name, cleans up after a predecessor and starts the PMIx server.
  // Blocks signals: call this before any thread is started.
  static Result<std::unique_ptr<Worker>> make(WorkerOptions options);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs until the core returns Exit; returns its code. exit_message() has its
  // message.
  int run();
  const std::string& exit_message() const { return exit_message_; }
  const std::string& name() const { return options_.name; }

 private:
  explicit Worker(WorkerOptions options);
  Status start();
  Status claim_name();
  void open_log();
  void log_to_run(const std::string& run_dir);

  // Waits for the run directory.
  void connect();
  void connect_to(const std::string& address);
  void open_client(const Route& route);
  wire::KeyChoice key_choice() const;
  void take_keys(const Keys& keys, int64_t now_ms);
  void be_as_patient(int64_t dead_after_ms);
  void open_next(const std::optional<wire::ClientKeys>& keys);
  void use_next_client();
  void disconnect();
  void on_message();
  void on_directive(const pb::Directive& directive);
  void on_tick();
  void on_signal(int signal) {
    log_->info("signal", {{"signal", signal}});
    feed(Terminate{});
  }
  void look_for_coordinator(int64_t now_ms);
  void watch_silence(int64_t now_ms);
  void on_lookup(const RunLookup& lookup, int64_t now_ms);
  void check_wire_version();
  void check_key();
  void note_refusal(pb::Refusal::Kind kind, const std::string& reason);

  // Passes an event to the core, after the one being handled if there is one.
  void feed(Event event);
  // One overload for each alternative of Action.
  void act(const Send& action) { send(action.message); }
  void act(const Spawn& a) { launcher_->spawn(a.assignment, a.state_job); }
  void act(const KillRanks& a) { launcher_->kill(a.generation); }
  void act(const TearDown& a) { launcher_->tear_down(a.generation); }
  void act(const TakeInventory& action);
  void act(const CompleteFence& a) {
    launcher_->complete_fence(a.generation, a.index, a.blob);
  }
  void act(const MeasureHardware& action);
  void act(const SetRequest& action);
  void act(const LogEvent& a) { log_->info(a.event, {{"detail", a.detail}}); }
  void act(const Exit& action);
  void refresh_states(int64_t now_ms);
  void look_for_lost_states();
  void remove_states();
  void send(pb::Envelope envelope);

  WorkerOptions options_;
  CoordinatorAddress coordinator_;
  std::shared_ptr<Logger> log_;
  bool logs_to_run_ = false;
  wire::Loop loop_{kIdleTickMs};
  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<WireGuard> wireguard_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<wire::Client> client_;
  std::string address_;     // of the coordinator that client_ connects to
  bool only_ipv6_ = false;  // its host
  int silence_ms_ = wire::kSilenceMs;  // after which client_ is lost
  // The way to address_, which a thread looks for: a name server may be down.
  std::shared_ptr<Background<Route>> route_;
  // With a new key, until it is open; with the key before, until the
  // coordinator has answered to the new one.
  std::unique_ptr<wire::Client> next_;
  std::unique_ptr<wire::Client> former_;
  Keys keys_ = unavailable("not read yet");   // the newest
  std::optional<wire::ClientKeys> used_;      // of client_, or next_
  wire::KeyPair own_ = wire::new_key_pair();  // with a job secret
  int64_t looked_ms_ = 0;                     // last look-up
  bool waits_ = false;       // waiting for a coordinator was logged
  int64_t heard_ms_ = 0;     // last directive, connection attempt or look-up
  int64_t answered_ms_ = 0;  // last directive, or the start
  SilenceWatch silence_;
  // The reason of a silence, which a thread looks for.
  std::shared_ptr<Background<std::string>> probe_;
  // What the run directory and the key files say, which a thread reads: they
  // may hang.
  std::shared_ptr<Background<Lookup>> lookup_;
  std::shared_ptr<Background<HardwareMeasured>> hardware_;  // being measured
  int64_t ticked_ms_ = 0;  // last Tick passed to the core
  std::deque<Event> events_;
  bool feeding_ = false;
  uint64_t state_job_ = 0;  // job whose states are kept here; 0: unknown yet
  int64_t states_refreshed_ms_ = 0;
  InventoryTaken inventory_;  // the last one
  std::optional<uint64_t> state_room_;
  int64_t room_ms_ = INT64_MIN / 2;  // when it was measured
  States states_after_ = States::kKept;
  std::optional<int> exit_code_;
  std::string exit_message_;
  std::string foreign_job_;  // last job refused, to log it once
  std::string refusal_;      // since the last directive; "": none
  // Its kind, to log each once.
  std::optional<pb::Refusal::Kind> refused_;
  std::string dropped_;  // why the last directive was, likewise

  static constexpr int kIdleTickMs = 50;
};

}  // namespace remesh::agent
