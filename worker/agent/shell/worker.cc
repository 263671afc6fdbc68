#include "worker/agent/shell/worker.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <random>
#include <utility>
#include <vector>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/clock.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"
#include "proto/rundir/paths.h"
#include "proto/wire/protocol.h"
#include "worker/agent/shell/hardware.h"
#include "worker/agent/shell/probe.h"
#include "worker/agent/shell/process_control.h"
#include "worker/agent/shell/state_folder.h"

namespace remesh::agent {
namespace {

// How long a new worker waits for a killed predecessor of the same name to
// disappear.
constexpr int64_t kPredecessorMs = 2000;
// How often the boards are polled while ranks run. A finished step is reported
// within this time.
constexpr int kBoardTickMs = 10;
constexpr int kMaxNameSuffix = 1000;
constexpr int64_t kRefreshStatesMs = 60'000;
constexpr int64_t kMeasureRoomMs = 1000;

// The host's name as a worker's: other characters become '-'.
std::string as_worker_name(std::string host) {
  host = host.substr(0, 56);
  for (char& c : host)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' &&
        c != '_')
      c = '-';
  return valid_name(host) ? host : "worker";
}

// Milliseconds since 1970, then random bits.
uint64_t incarnation_by_clock() {
  const uint64_t ms = static_cast<uint64_t>(unix_seconds() * 1000);
  std::random_device device;
  constexpr int kBits = limits::kIncarnationBits;
  return (ms << kBits) | (device() & ((1U << kBits) - 1));
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
  wireguard_.reset();
  scratch_.reset();
}

Status Worker::start() {
  ASSIGN_OR_RETURN(coordinator_, CoordinatorAddress::parse(options_.connect));
  PortRange ports;
  if (!options_.mpi_ports.empty()) {
    auto parsed = parse_ports(options_.mpi_ports);
    if (!parsed.ok())
      return invalid_argument("--mpi-ports " + parsed.status().message());
    ports = *parsed;
  }
  if (access(options_.trainer.c_str(), X_OK) != 0)
    return not_found("trainer program " + options_.trainer +
                     " (give its path with --trainer)");
  RETURN_IF_ERROR(loop_.watch_signals({SIGTERM, SIGINT, SIGHUP},
                                      [this](int s) { on_signal(s); }));
  RETURN_IF_ERROR(claim_name());
  open_log();
  if (!scratch_->cleaned().empty())
    log_->warn("cleaned_up", {{"left", scratch_->cleaned()}});
  if (options_.host_name.empty()) options_.host_name = host_identity();
  pb::Report about;
  about.set_worker(options_.name);
  about.set_incarnation(scratch_->new_incarnation(incarnation_by_clock()));
  about.set_host(options_.host_name);
  about.set_host_id(host_id());
  about.set_pid(getpid());
  about.set_slots(options_.slots);
  about.set_cores(usable_cores());
  about.set_memory_bytes(usable_memory());
  about.set_build(wire::own_build());
  wire::set_protocol(wire::own_protocol(), &about);
  agent_ = std::make_unique<Agent>(about);
  LauncherOptions launcher;
  launcher.worker = options_.name;
  launcher.trainer = options_.trainer;
  launcher.cores = about.cores();
  launcher.tcp_interfaces = options_.interface;
  launcher.ports = ports;
  if (options_.wireguard >= 0) {
    ASSIGN_OR_RETURN(wireguard_,
                     WireGuard::make(scratch_->folder(), options_.wireguard)
                         .with_context("--wireguard"));
    launcher.wireguard = wireguard_.get();
  }
  launcher.restart = [this] {
    if (agent_->ends()) return;  // the next life would not know
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
                                {"pid", about.pid()},
                                {"slots", about.slots()},
                                {"cores", about.cores()},
                                {"incarnation", about.incarnation()},
                                {"scratch", scratch_->folder()}});
  if (options_.no_auth)
    log_->warn("no_auth", {{"risk",
                            "whoever answers at the coordinator's "
                            "address controls this worker"}});
  connect();
  return exit_code_ ? invalid_argument(exit_message_) : ok_status();
}

// Without --name, the worker takes the first free name of host, host-2, ...:
// a different one for each worker of a host. Names of which states are left
// come first, so that a worker has its own again after a restart.
Status Worker::claim_name() {
  const std::string root =
      options_.scratch.empty() ? default_scratch_root() : options_.scratch;
  const bool given = !options_.name.empty();
  const std::string base =
      given ? options_.name
            : as_worker_name(options_.host_name.empty() ? host_name()
                                                        : options_.host_name);
  const std::string shared =
      options_.state_folder.empty() ? kSharedMemory : options_.state_folder;
  std::vector<std::string> names = {base};
  for (int i = 2; !given && i <= kMaxNameSuffix; ++i)
    names.push_back(fmt::format("{}-{}", base, i));
  if (!given)
    std::stable_partition(names.begin(), names.end(), [&](const auto& name) {
      return Scratch::has_states_of(root, name, shared);
    });
  for (const std::string& name : names) {
    // A worker is often restarted under the same name immediately.
    const std::string folder =
        given && !options_.scratch_name.empty() ? options_.scratch_name : name;
    auto scratch =
        Scratch::open(root, folder, given ? kPredecessorMs : 0, shared);
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

void Worker::open_log() {
  log_ = Logger::open({.name = "worker " + options_.name,
                       .path = options_.log,
                       .to_stderr = options_.log.empty()});
}

void Worker::log_to_run(const std::string& run_dir) {
  if (logs_to_run_ || !options_.log.empty() || run_dir.empty()) return;
  logs_to_run_ = true;
  const std::string path = rundir::worker_log_path(run_dir, options_.name);
  log_->info("log_continues", {{"path", path}});
  log_ = Logger::open({.name = "worker " + options_.name, .path = path});
  launcher_->set_logger(log_);
  log_->info("worker_joined_run", {{"worker", options_.name},
                                   {"host", options_.host_name},
                                   {"pid", getpid()}});
}

// --------------------------------------------------------------- coordinator

void Worker::on_message() {
  while (client_) {
    auto envelope = client_->receive();
    if (!envelope) return;
    former_.reset();
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
      const pb::Refusal& no = envelope->refusal();
      note_refusal(no.kind(), no.reason());
      feed(Refused{.reason = why_refused(address_, no, options_.job),
                   .kind = no.kind()});
    }
    if (exit_code_) return;
  }
}

void Worker::on_directive(const pb::Directive& directive) {
  const Status sound = limits::check(directive);
  if (const std::string& why = sound.message();
      !sound.ok() && std::exchange(dropped_, why) != why)
    log_->warn("directive_dropped", {{"reason", why}});
  const bool counts = sound.ok() && agent_->is_mine(directive);
  if (counts) {
    heard_ms_ = answered_ms_ = monotonic_ms();
    refusal_.clear();
    refused_.reset();
    coordinator_.set_run(directive.run_dir());
    be_as_patient(directive.dead_after_ms());
  }
  if (counts && directive.has_assignment()) {
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

void Worker::act(const MeasureHardware&) {
  hardware_ = Background<HardwareMeasured>::start([] {
    const auto program = program_beside("remesh-measure");
    return program.ok() ? describe_hardware(*program)
                        : HardwareMeasured{.error = program.status().message()};
  });
}

void Worker::act(const SetRequest& action) {
  log_->info("request", {{"bits", action.bits},
                         {"checkpoint_request", action.checkpoint_request}});
  launcher_->set_request(action.bits, action.checkpoint_request);
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
  inventory_ = e;
  feed(std::move(e));
}

// A job whose coordinator was not heard for long may have ended elsewhere; its
// states are not claimed any more.
void Worker::refresh_states(int64_t now_ms) {
  states_refreshed_ms_ = now_ms;
  const bool claimed = now_ms - answered_ms_ < 1000 * memory::kStateUnclaimedS;
  const int removed = scratch_->refresh_states(claimed ? state_job_ : 0);
  if (removed > 0) log_->info("old_states_removed", {{"segments", removed}});
}

// The ranks look themselves.
void Worker::look_for_lost_states() {
  if (!launcher_->idle()) return;
  for (const pb::StateHolding& h : inventory_.holdings) {
    if (access(h.segment().c_str(), F_OK) == 0) continue;
    log_->warn("states_lost",
               {{"segment", h.segment()},
                {"reason", fmt::format("a rank of this host needed its room, "
                                       "or {}",
                                       memory::kWhoRemoves)}});
    const int64_t generation = inventory_.generation;
    inventory_ = take_inventory(scratch_->state_folder(), state_job_);
    inventory_.generation = generation;
    feed(inventory_);
    return;
  }
}

void Worker::remove_states() {
  if (states_after_ == States::kKept) {
    refresh_states(monotonic_ms());  // their time begins now
    // A rank that failed before its first step leaves a segment without states.
    const InventoryTaken held =
        take_inventory(scratch_->state_folder(), state_job_);
    if (held.holdings.empty() && held.damaged.empty())
      scratch_->remove_states(state_job_, /*of_dead_workers=*/false);
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
    if (now - room_ms_ >= kMeasureRoomMs) {
      room_ms_ = now;
      state_room_ = scratch_->state_room(state_job_);
      look_for_lost_states();
    }
    feed(Tick{launcher_->samples(), state_room_});
  }
  if (hardware_ && hardware_->done) {
    const HardwareMeasured e = std::exchange(hardware_, nullptr)->result;
    log_->info("hardware",
               {{"description", e.description}, {"error", e.error}});
    feed(e);
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

int Worker::run() {
  const int code = loop_.run();
  log_->info("worker_exiting", {{"code", code}, {"message", exit_message_}});
  launcher_->shut_down();
  remove_states();
  log_->flush();
  return code;
}

}  // namespace remesh::agent
