// Client of a coordinator: a command, a reply, a time limit.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/newest_state.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::ctl {

// A run as named by the user: an address, or a run directory as
// rundir::find_run() takes it.
struct Target {
  std::string run_dir;   // "" if only an address was given
  std::string address;   // "" if the run has no coordinator
  bool no_auth = false;  // the coordinator runs without keys
};
// Io where that cannot be read.
Result<Target> find_target(const std::string& named);

pb::Command command_of(pb::Command::Kind kind);

// A connection on which the coordinator was asked, before it got a command, to
// tell of the end of the job: that may come before anything else is asked.
struct Connection {
  std::string address;
  std::unique_ptr<wire::Client> client;
};
// Sends the command to the run's coordinator, repeatedly until it replies, and
// returns the state of the job. Ended if there is no coordinator, Unavailable
// if it does not reply in time, or the error of a refused command. *kept: for
// next_status().
Result<pb::JobStatus> send_command(const Target& target,
                                   const pb::Command& command,
                                   Connection* kept = nullptr);
// The same with the address read again: a coordinator may have restarted, and a
// request for a change gives it a moment for that.
Result<pb::JobStatus> send_command(const std::string& run,
                                   const pb::Command& command,
                                   Connection* kept = nullptr);

// Where the newest state of a run is that has no coordinator, as far as this
// host can see: rundir::newest_state() with the run's own journal and job.
rundir::NewestState newest_state_of(const std::string& run);
// The coordinator that runs the job in that directory already, a pid; 0 if
// there is none. InvalidArgument if its job is another one. Waits a moment for
// one that has just begun, and has not written its job yet, and for one whose
// job has ended to leave.
Result<int> running_coordinator(const rundir::Continuation& with,
                                const std::string& run);
// Why a run has no coordinator, and how to continue it from that state.
std::string why_not_running(const std::string& run,
                            const rundir::NewestState& newest);

// How long send_command() waits for the status; longer for changes.
inline constexpr int kReplyMs = 3000;
// Sleeps between two commands that poll the state of a job.
void wait_for_next_poll();
// Whether JobStatus.state is final.
bool has_ended(pb::JobStatus::State state);

// Sends commands to the coordinator of a run without waiting, one at a time.
// Threads: one.
class CommandClient {
 public:
  // `run`: a run directory or an address.
  explicit CommandClient(std::string run, Connection connection = {})
      : run_(std::move(run)),
        address_(std::move(connection.address)),
        client_(std::move(connection.client)) {}
  // Abandons the previous command, unless that has the same id; without an id
  // the command gets a new one. Connects first if need be, also to another
  // coordinator than before; does nothing if the run has none.
  void send(pb::Command command);
  std::optional<pb::Reply> poll();  // the reply to it, once
  bool waiting() const { return waiting_; }
  // Abandons the command; the next one uses a new connection.
  void disconnect();

 private:
  std::string run_;
  std::string address_;  // that client_ is connected to
  std::unique_ptr<wire::Client> client_;
  uint64_t id_ = 0;
  bool waiting_ = false;
};

// After a while: the status at the end of the job if that has come meanwhile,
// else what send_command() says. A host that cannot see the run directory has
// no other way to learn of the end. `ending`: one client for all calls.
Result<pb::JobStatus> next_status(const std::string& run,
                                  CommandClient* ending);

}  // namespace remesh::ctl
