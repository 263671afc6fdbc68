#include "worker/agent/shell/worker.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <random>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/rundir/paths.h"
#include "worker/agent/shell/probe.h"
#include "worker/agent/shell/process.h"
#include "worker/agent/shell/rank_env.h"
#include "worker/agent/shell/state_folder.h"

namespace remesh::agent {
namespace {

// How long a new worker waits for a killed predecessor of the same name to
// disappear.
constexpr int64_t kPredecessorMs = 2000;
// How often the boards are polled while ranks run. A finished step is reported
// within this time.
constexpr int kBoardTickMs = 10;
// A coordinator that is silent this long may have moved to another address.
constexpr int64_t kLookAgainMs = 500;
// A run that has ended and has no coordinator for this long is not resumed now.
constexpr int64_t kEndedMs = 2000;
constexpr int kMaxNameSuffix = 1000;
constexpr int64_t kRefreshStatesMs = 60'000;

// The host's name as a worker's: other characters become '-'.
std::string as_worker_name(std::string host) {
  host = host.substr(0, 56);
  for (char& c : host)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' &&
        c != '_')
      c = '-';
  return valid_name(host) ? host : "worker";
}

// Increases with each start: milliseconds since 1970, then random bits in case
// the clock did not advance.
uint64_t new_incarnation() {
  const uint64_t ms = static_cast<uint64_t>(unix_seconds() * 1000);
  std::random_device device;
  return (ms << 20) | (device() & 0xFFFFF);
}

}  // namespace

Worker::Worker(WorkerOptions options) : options_(std::move(options)) {}

Result<std::unique_ptr<Worker>> Worker::make(WorkerOptions options) {
  std::unique_ptr<Worker> out(new Worker(std::move(options)));
  RETURN_IF_ERROR(out->start());
  return out;
}

Worker::~Worker() {
  disconnect();
  launcher_.reset();  // kills and reaps, ends the PMIx server
  scratch_.reset();
}

Status Worker::start() {
  ASSIGN_OR_RETURN(coordinator_, CoordinatorAddress::parse(options_.connect));
  if (access(options_.trainer.c_str(), X_OK) != 0)
    return not_found("trainer program " + options_.trainer +
                     " (give its path with --trainer)");
  RETURN_IF_ERROR(loop_.watch_signals({SIGTERM, SIGINT, SIGHUP},
                                      [this](int s) { on_signal(s); }));
  RETURN_IF_ERROR(claim_name());
  RETURN_IF_ERROR(open_log());
  if (!scratch_->cleaned().empty())
    log_->warn("cleaned_up", {{"left", scratch_->cleaned()}});
  if (options_.host_name.empty()) options_.host_name = host_name();
  Options core;
  core.worker = options_.name;
  core.incarnation = new_incarnation();
  core.host = options_.host_name;
  core.pid = getpid();
  core.slots = options_.slots;
  core.cores = usable_cores();
  core.memory_bytes = usable_memory();
  core.version = options_.version;
  agent_ = std::make_unique<Agent>(core);
  LauncherOptions launcher;
  launcher.worker = options_.name;
  launcher.trainer = options_.trainer;
  launcher.cores = core.cores;
  launcher.tcp_interfaces = options_.interface;
  launcher.restart = [this] {
    log_->error("restarting", {{"reason", "the PMIx server does not answer"}});
    log_->flush();
    const Status failed = restart_process();
    log_->error("restart_failed", {{"error", failed.to_string()}});
  };
  ASSIGN_OR_RETURN(launcher_,
                   Launcher::make(launcher, scratch_.get(), &loop_,
                                  [this](Event e) { feed(std::move(e)); }));
  launcher_->set_logger(log_);
  loop_.on_tick([this] { on_tick(); });
  answered_ms_ = monotonic_ms();
  log_->info("worker_started", {{"worker", options_.name},
                                {"host", options_.host_name},
                                {"pid", core.pid},
                                {"slots", core.slots},
                                {"cores", core.cores},
                                {"incarnation", core.incarnation},
                                {"scratch", scratch_->folder()}});
  connect();
  return exit_code_ ? invalid_argument(exit_message_) : ok_status();
}

// Without --name, the worker takes the first free name of host, host-2, ...:
// the same one after a restart, and a different one for each worker of a host.
Status Worker::claim_name() {
  const std::string root =
      options_.scratch.empty() ? default_scratch_root() : options_.scratch;
  const bool given = !options_.name.empty();
  const std::string base =
      given ? options_.name
            : as_worker_name(options_.host_name.empty() ? host_name()
                                                        : options_.host_name);
  for (int i = 1; i <= kMaxNameSuffix; ++i) {
    const std::string name = i == 1 ? base : fmt::format("{}-{}", base, i);
    // A worker is often restarted under the same name immediately.
    const std::string folder =
        given && !options_.scratch_name.empty() ? options_.scratch_name : name;
    auto scratch = Scratch::open(root, folder, given ? kPredecessorMs : 0);
    if (scratch.ok()) {
      scratch_ = std::move(scratch).value();
      options_.name = name;
      return ok_status();
    }
    if (given || scratch.status().code() != Code::kAlreadyExists)
      return scratch.status();
  }
  return exhausted(
      fmt::format("{} workers named '{}-N' are running on this host",
                  kMaxNameSuffix, base));
}

// ------------------------------------------------------------------- logging

Status Worker::open_log() {
  LogOptions log;
  log.name = "worker " + options_.name;
  log.path = options_.log;
  log.to_stderr = options_.log.empty();
  ASSIGN_OR_RETURN(log_, Logger::open(log));
  return ok_status();
}

void Worker::log_to_run(const std::string& run_dir) {
  if (logs_to_run_ || !options_.log.empty() || run_dir.empty()) return;
  logs_to_run_ = true;
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::create_directories(rundir::logs_path(run_dir), ignored);
  LogOptions log;
  log.name = "worker " + options_.name;
  log.path = rundir::worker_log_path(run_dir, options_.name);
  auto opened = Logger::open(log);
  if (!opened.ok()) {
    log_->warn("run_log_failed", {{"error", opened.status().message()}});
    return;
  }
  log_->info("log_continues", {{"path", log.path}});
  log_ = std::move(opened).value();
  launcher_->set_logger(log_);
  log_->info("worker_joined_run", {{"worker", options_.name},
                                   {"host", options_.host_name},
                                   {"pid", getpid()}});
}

// --------------------------------------------------------------- coordinator

void Worker::connect() {
  heard_ms_ = monotonic_ms();
  const auto address = coordinator_.read();
  if (!address.ok()) {
    if (address_.empty() && !std::exchange(waits_, true))
      log_->info("waiting_for_coordinator",
                 {{"reason", address.status().message()}});
    return;
  }
  if (client_ && *address == address_) return;
  disconnect();
  auto client = wire::Client::connect(*address);
  if (!client.ok()) {
    log_->error("connect_failed", {{"error", client.status().message()}});
    // A fixed address cannot become valid.
    if (!coordinator_.may_change()) {
      exit_message_ = client.status().message();
      exit_code_ = kExitUsage;
    }
    return;
  }
  client_ = std::move(client).value();
  address_ = *address;
  loop_.watch(client_->fd(), [this] { on_message(); });
  if (options_.interface.empty())
    launcher_->set_tcp_interfaces(network_towards(address_));
  log_->info("connecting", {{"coordinator", address_}});
}

void Worker::disconnect() {
  if (!client_) return;
  loop_.unwatch(client_->fd());
  client_.reset();
}

void Worker::look_for_coordinator(int64_t now_ms) {
  if (coordinator_.may_change() && now_ms - heard_ms_ >= kLookAgainMs)
    connect();
}

void Worker::watch_silence(int64_t now_ms) {
  if (probe_ && probe_->done) {
    log_->warn("no_coordinator",
               {{"coordinator", address_},
                {"silent_s", (now_ms - answered_ms_) / 1000},
                {"reason", probe_->text},
                {"next", "still trying; Ctrl-C or SIGTERM to leave"}});
    probe_.reset();
  }
  check_wire_version();
  check_run_ended(now_ms);
  if (!client_ || probe_ || !silence_.due(answered_ms_, now_ms)) return;
  probe_ = std::make_shared<BackgroundText>();
  std::thread([probe = probe_, address = address_] {
    probe->text = why_no_answer(address);
    probe->done = true;
  }).detach();
}

void Worker::check_run_ended(int64_t now_ms) {
  if (!coordinator_.may_change() || now_ms - answered_ms_ < kEndedMs ||
      coordinator_.read().ok())
    return;
  const std::string outcome = coordinator_.outcome();
  if (outcome.empty()) return;
  feed(RunEnded{fmt::format(
      "{}: the run has ended ({}); continue it with `remesh resume {}`, then "
      "start the worker again",
      options_.connect, outcome, options_.connect)});
}

void Worker::check_wire_version() {
  const auto theirs = client_ ? client_->foreign_version() : std::nullopt;
  if (!theirs) return;
  feed(Refused{fmt::format(
      "the coordinator at {} speaks version {} of the protocol and this worker "
      "version {}; install the same release of remesh on both",
      address_, *theirs, wire::kVersion)});
}

void Worker::on_message() {
  while (client_) {
    auto envelope = client_->receive();
    if (!envelope) return;
    const std::string& job = envelope->job();
    if (!options_.job.empty() && !job.empty() && job != options_.job) {
      if (std::exchange(foreign_job_, job) != job)
        log_->warn("foreign_job", {{"job", job}, {"ours", options_.job}});
      continue;
    }
    if (envelope->has_directive()) {
      on_directive(envelope->directive());
    } else if (envelope->has_fence_out()) {
      feed(FenceOutReceived{std::move(*envelope->mutable_fence_out())});
    } else if (envelope->has_refusal()) {
      const std::string& reason = envelope->refusal().reason();
      if (std::exchange(refusal_, reason) != reason)
        log_->warn("refused", {{"reason", reason}});
      feed(Refused{fmt::format(
          "the coordinator at {} refuses this worker: {}; connect to the "
          "coordinator of \"{}\", or leave --job out",
          address_, reason, options_.job)});
    }
    if (exit_code_) return;
  }
}

void Worker::on_directive(const pb::Directive& directive) {
  heard_ms_ = answered_ms_ = monotonic_ms();
  if (directive.worker() == options_.name && directive.has_assignment()) {
    // From now on the worker belongs to this job, even if another coordinator
    // answers at the address.
    if (options_.job.empty()) options_.job = directive.job();
    log_to_run(directive.assignment().run_dir());
  }
  feed(DirectiveReceived{directive});
}

void Worker::send(pb::Envelope envelope) {
  envelope.set_job(options_.job);
  // A lost message needs no handling: the protocol repeats its messages.
  if (client_) (void)client_->send(envelope);
}

// ---------------------------------------------------------------------- core

void Worker::feed(Event event) {
  events_.push_back(std::move(event));
  if (feeding_) return;
  feeding_ = true;
  while (!events_.empty() && !exit_code_) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    for (const Action& action : agent_->on(next, monotonic_ms()))
      std::visit([this](const auto& a) { act(a); }, action);
  }
  feeding_ = false;
  if (exit_code_) loop_.stop(*exit_code_);
}

void Worker::act(const SendReport& action) {
  pb::Envelope e;
  *e.mutable_report() = action.report;
  send(std::move(e));
}

void Worker::act(const SendFence& action) {
  pb::Envelope e;
  *e.mutable_fence_in() = action.fence;
  send(std::move(e));
}

void Worker::act(const Spawn& action) {
  launcher_->spawn(action.assignment, action.state_job);
}

void Worker::act(const KillRanks& action) {
  launcher_->kill(action.generation);
}

void Worker::act(const TearDown& action) {
  launcher_->tear_down(action.generation);
}

void Worker::act(const CompleteFence& action) {
  launcher_->complete_fence(action.generation, action.index, action.blob);
}

void Worker::act(const SetRequest& action) {
  log_->info("request", {{"bits", action.bits},
                         {"checkpoint_request", action.checkpoint_request}});
  launcher_->set_request(action.bits, action.checkpoint_request);
}

void Worker::act(const LogEvent& action) {
  log_->info(action.event, {{"detail", action.detail}});
}

void Worker::act(const Exit& action) {
  exit_code_ = action.code;
  exit_message_ = action.message;
  states_after_ = action.states;
  // The agent may never have asked for an inventory.
  if (action.state_job != 0) state_job_ = action.state_job;
}

// -------------------------------------------------------------------- states

void Worker::act(const TakeInventory& action) {
  const std::string folder = scratch_->state_folder();
  const bool first = std::exchange(state_job_, action.job) != action.job;
  if (first) refresh_states(monotonic_ms());
  InventoryTaken e = take_inventory(folder, action.job);
  e.generation = action.generation;
  // States of a predecessor are found once; those of a generation are expected.
  if (!e.holdings.empty())
    log_->info(first ? "states_found" : "states_held",
               {{"states", describe_states(folder, action.job, e)},
                {"folder", folder}});
  const uint64_t others = first ? bytes_of_others(folder, action.job) : 0;
  if (others > 0)
    log_->warn("states_of_other_jobs", {{"size", format_bytes(others)},
                                        {"kept_s", kStateKeptS},
                                        {"folder", folder}});
  for (const std::string& d : e.damaged)
    log_->warn("state_damaged", {{"reason", d}});
  feed(std::move(e));
}

void Worker::refresh_states(int64_t now_ms) {
  states_refreshed_ms_ = now_ms;
  const int removed = scratch_->refresh_states(state_job_);
  if (removed > 0) log_->info("old_states_removed", {{"segments", removed}});
}

void Worker::remove_states() {
  if (states_after_ == States::kKept) {
    if (has_states(scratch_->state_folder()))
      log_->warn("states_kept", {{"folder", scratch_->state_folder()},
                                 {"seconds", kStateKeptS},
                                 {"reason", "they may still be needed"}});
    return;
  }
  const int removed = scratch_->remove_states(
      state_job_, states_after_ == States::kRemovedForAll);
  if (removed > 0) log_->info("states_removed", {{"segments", removed}});
}

void Worker::on_tick() {
  const int64_t now = monotonic_ms();
  launcher_->reap();
  const bool moved = launcher_->beat(now);
  if (moved || now - ticked_ms_ >= agent_->report_every_ms()) {
    ticked_ms_ = now;
    feed(Tick{launcher_->samples()});
  }
  look_for_coordinator(now);
  watch_silence(now);
  if (now - states_refreshed_ms_ >= kRefreshStatesMs) refresh_states(now);
  const int64_t report = std::max<int64_t>(1, agent_->report_every_ms());
  loop_.set_tick_ms(launcher_->running() ? kBoardTickMs
                                         : static_cast<int>(std::min<int64_t>(
                                               kIdleTickMs, report)));
  if (exit_code_) loop_.stop(*exit_code_);
}

void Worker::on_signal(int signal) {
  log_->info("signal", {{"signal", signal}});
  feed(Terminate{});
}

int Worker::run() {
  const int code = loop_.run();
  log_->info("worker_exiting", {{"code", code}, {"message", exit_message_}});
  launcher_->shut_down();
  remove_states();
  log_->flush();
  return code;
}

}  // namespace remesh::agent
