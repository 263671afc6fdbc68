#include "coordinator/ctl/client.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "coordinator/core/durable.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/rundir/file_tail.h"
#include "proto/wire/key_choice.h"

namespace remesh::ctl {
namespace {

constexpr int64_t kResendMs = 500;
constexpr int kPollMs = 50;
constexpr int kStatusIntervalMs = 200;
// The reply to a request for a change is sent when that is on disk, or after
// Outbox::Options::stalled_ms, which is less.
constexpr int kChangeReplyMs = 10'000;
// `remesh run` starts a coordinator again that was killed, and so may a service
// manager: how long a request for a change waits for it.
constexpr int kRestartMs = 1500;

// From the options of the verb, of which there is one in a process.
wire::KeyChoice& key_options() {
  static wire::KeyChoice options;
  return options;
}

Result<std::unique_ptr<wire::Client>> connect(const Target& target) {
  wire::KeyChoice choice = key_options();
  choice.run = target.run_dir;
  choice.member = "operator";
  choice.no_auth |= target.no_auth;
  // It may be the key of another run.
  const char* const environment = std::getenv("REMESH_KEY");
  if (choice.key.empty() && environment != nullptr &&
      (choice.run.empty() ||
       access(rundir::key_path(choice.run, choice.member).c_str(), R_OK) != 0))
    choice.key = environment;
  ASSIGN_OR_RETURN(const auto keys, wire::choose_keys(choice));
  return wire::Client::connect(target.address, keys);
}

// All copies of a command have one id: the reply to any of them will do.
constexpr uint64_t kCommandId = 1;
constexpr uint64_t kEndId = 2;

pb::Command end_request() {
  pb::Command command = command_of(pb::Command::STATUS);
  command.set_id(kEndId);
  command.set_at_end(true);
  return command;
}

// One command and its reply. Unavailable after kReplyMs or kChangeReplyMs;
// InvalidArgument after kReplyMs if the coordinator refuses this program.
Result<pb::Reply> exchange(const Target& target, const pb::Command& command,
                           Connection* kept) {
  const std::string& address = target.address;
  ASSIGN_OR_RETURN(auto client, connect(target));
  pb::Envelope envelope, at_end;
  *envelope.mutable_command() = command;
  envelope.mutable_command()->set_id(kCommandId);
  *at_end.mutable_command() = end_request();
  const int64_t patience_ms =
      command.kind() == pb::Command::STATUS ? kReplyMs : kChangeReplyMs;
  int64_t waited_ms = 0;  // without what this process itself was stopped for
  int64_t last_ms = monotonic_ms();
  int64_t send_at = 0;
  while (waited_ms < (client->trouble().empty() ? patience_ms : kReplyMs)) {
    const int64_t now = monotonic_ms();
    waited_ms +=
        std::min<int64_t>(now - std::exchange(last_ms, now), kResendMs);
    if (now >= send_at) {
      if (kept != nullptr) client->send(at_end);
      client->send(envelope);
      send_at = now + kResendMs;
    }
    while (auto received = client->receive()) {
      if (!received->has_reply() || received->reply().id() != kCommandId)
        continue;
      if (kept != nullptr) *kept = {address, std::move(client)};
      return std::move(*received->mutable_reply());
    }
    if (const auto theirs = client->foreign_version())
      return internal(fmt::format(
          "the coordinator at {} speaks version {} of the protocol and this "
          "program version {}; install the same release of remesh on both",
          address, *theirs, wire::kVersion));
    pollfd fd{client->fd(), POLLIN, 0};
    ::poll(&fd, 1, kPollMs);
  }
  if (!client->trouble().empty())
    return invalid_argument(fmt::format("{}: {}", address, client->trouble()));
  return unavailable(
      fmt::format("no answer from {} within {}", address,
                  format_duration(static_cast<double>(patience_ms) / 1000)));
}

bool is_address(const std::string& named) {
  return named.starts_with("tcp://") || wire::is_ipc(named);
}

// `run`: an address or a run directory, of which only the endpoint is read.
Target target_at(const std::string& run) {
  if (is_address(run)) return {.address = run};
  Target target{.run_dir = run};
  auto endpoint = rundir::read_endpoint(run);
  if (!endpoint.ok()) return target;
  target.address = endpoint->address;
  target.no_auth = endpoint->no_auth;
  return target;
}

// Whether there is an address, and not of a process of this host that is dead.
bool coordinator_may_answer(const Target& target) {
  const auto e = rundir::read_endpoint(target.run_dir);
  return e.ok() && (!rundir::lock_tells(*e) ||
                    rundir::RunLock::holder(target.run_dir) > 0);
}

// Returns when a run that has not ended has a coordinator, or after kRestartMs.
// The new one may have another address.
Status await_restart(Target* target) {
  const std::string run = target->run_dir;
  for (const int64_t since_ms = monotonic_ms();
       !run.empty() && !coordinator_may_answer(*target) &&
       !rundir::end_of_run(run) && monotonic_ms() - since_ms < kRestartMs;) {
    wait_for_next_poll();
    ASSIGN_OR_RETURN(*target, find_target(run));
  }
  return ok_status();
}

}  // namespace

void add_client_options(CLI::App* verb, std::string* run) {
  wire::KeyChoice& o = key_options();
  add_run_option(verb, run);
  verb->add_option("--key", o.key,
                   "File of your key. Default: that of the run directory, or "
                   "where that cannot be read REMESH_KEY in the environment");
  verb->add_option("--server-key", o.server,
                   "The coordinator's public key, or a file with it. Default: "
                   "that of the run directory, or of your key file");
  verb->add_flag("--no-auth", o.no_auth, "The coordinator runs with --no-auth");
}

Result<Target> find_target(const std::string& named) {
  if (is_address(named)) return target_at(named);
  ASSIGN_OR_RETURN(const std::string run, rundir::find_run(named));
  // Whether it has a coordinator is not known then.
  const Status read = rundir::read_endpoint(run).status();
  if (read.code() == Code::kIo) return read;
  return target_at(run);
}

pb::Command command_of(pb::Command::Kind kind) {
  pb::Command command;
  command.set_kind(kind);
  return command;
}

void CommandClient::send(pb::Command command) {
  const Target target = target_at(run_);
  // The run directory may be gone, and the coordinator be there.
  const bool found = !target.address.empty();
  if (!found && !client_) return;
  if (found && (!client_ || target.address != address_)) {
    auto client = connect(target);
    if (!client.ok()) return;
    client_ = std::move(*client);
    address_ = target.address;
  }
  id_ = command.has_id() ? command.id() : id_ + 1;
  command.set_id(id_);
  pb::Envelope envelope;
  *envelope.mutable_command() = std::move(command);
  waiting_ = client_->send(envelope);
}

std::optional<pb::Reply> CommandClient::poll() {
  while (waiting_) {
    auto envelope = client_->receive();
    if (!envelope) break;
    // Others are late replies to earlier commands.
    if (!envelope->has_reply() || envelope->reply().id() != id_) continue;
    waiting_ = false;
    return std::move(*envelope->mutable_reply());
  }
  return std::nullopt;
}

void CommandClient::disconnect() {
  client_.reset();
  waiting_ = false;
}

rundir::NewestState newest_state_of(const std::string& run) {
  const auto fs = posix_file_system();
  const auto journal = server::read_journal(*fs, rundir::journal_path(run));
  const auto job = rundir::load_resolved({}, run);
  if (!journal.ok() && !job.ok()) return {};
  return rundir::newest_state(*fs, run, job.ok() ? *job : journal->job(),
                              journal.ok() ? &*journal : nullptr);
}

Result<int> running_coordinator(const rundir::Continuation& with,
                                const std::string& run) {
  constexpr int64_t kMomentMs = 10'000;
  int holder = rundir::RunLock::holder(run);
  for (const int64_t since_ms = monotonic_ms();
       holder > 0 && monotonic_ms() - since_ms < kMomentMs &&
       (access(rundir::job_path(run).c_str(), F_OK) != 0 ||
        rundir::end_of_run(run));
       holder = rundir::RunLock::holder(run))
    wait_for_next_poll();
  if (holder == 0) return 0;
  ASSIGN_OR_RETURN(const rundir::JobChange change,
                   rundir::check_job(*posix_file_system(), with, run,
                                     /*journal=*/nullptr));
  if (change.keys.empty()) return holder;
  return invalid_argument(fmt::format(
      "{}: a coordinator (pid {}) runs this job with other settings ({}); stop "
      "it first (remesh stop {}), or give another --run-dir",
      run, holder, change.keys, rundir::typed_path(run)));
}

std::string why_not_running(const std::string& run,
                            const rundir::NewestState& newest) {
  if (const auto end = rundir::end_of_run(run)) {
    const bool in_memory = newest.source == pb::Source::MEMORY &&
                           end->outcome != pb::JobStatus::DONE &&
                           end->detail.empty();
    return rundir::end_text(*end, run) +
           (in_memory ? "; " + rundir::state_text(newest) : "");
  }
  const std::string resume = "remesh resume " + rundir::typed_path(run);
  const auto last = rundir::parse_metrics_line(
      rundir::read_last_line(rundir::metrics_path(run)));
  const auto event = rundir::parse_event_line(
      rundir::read_last_line(rundir::events_path(run)));
  const double heard = std::max(last.ok() ? last->time() : 0.0,
                                event.ok() ? event->time() : 0.0);
  return fmt::format(
      "not running since {}{}, although it has not ended{}{}; to "
      "continue: {}",
      last.ok() ? fmt::format("step {}", last->step())
                : "before the first step",
      heard > 0 ? ", " + rundir::date_text(heard) : "",
      newest.state_step > 0 ? "; " : "", rundir::state_text(newest), resume);
}

Result<pb::JobStatus> send_command(const Target& target,
                                   const pb::Command& command,
                                   Connection* kept) {
  if (!target.run_dir.empty() && !coordinator_may_answer(target))
    return ended(
        rundir::short_path(target.run_dir) + ": " +
        why_not_running(target.run_dir, newest_state_of(target.run_dir)));
  ASSIGN_OR_RETURN(const pb::Reply reply, exchange(target, command, kept));
  if (!reply.ok()) return Status(code_named(reply.code()), reply.error());
  return reply.status();
}

Result<pb::JobStatus> send_command(const std::string& run,
                                   const pb::Command& command,
                                   Connection* kept) {
  ASSIGN_OR_RETURN(Target target, find_target(run));
  if (command.kind() != pb::Command::STATUS)
    RETURN_IF_ERROR(await_restart(&target));
  return send_command(target, command, kept);
}

void wait_for_next_poll() {
  std::this_thread::sleep_for(std::chrono::milliseconds(kStatusIntervalMs));
}

bool has_ended(pb::JobStatus::State state) {
  // Phases have the same numbers (coordinator/core/job_status.cc).
  return core::terminal(static_cast<pb::Durable::Phase>(state));
}

Result<pb::JobStatus> next_status(const std::string& run,
                                  CommandClient* ending) {
  ending->send(end_request());
  wait_for_next_poll();
  auto reply = ending->poll();
  if (reply && has_ended(reply->status().state()))
    return std::move(*reply->mutable_status());
  return send_command(run, command_of(pb::Command::STATUS));
}

}  // namespace remesh::ctl
