#include "coordinator/server/daemon.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/first_steps.h"
#include "coordinator/server/journal.h"
#include "coordinator/server/listen.h"
#include "coordinator/server/scanner.h"
#include "coordinator/server/syncer.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/log.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"
#include "proto/wire/channel.h"
#include "proto/wire/loop.h"

namespace remesh::server {
namespace {

constexpr int kTickMs = 20;
constexpr int kSyncPeriodMs = 1000;
constexpr int kListenPatienceMs = 5000;
constexpr int kWritePauseMs = 100;

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

class DaemonImpl : public Daemon {
 public:
  explicit DaemonImpl(DaemonOptions options)
      : options_(std::move(options)), loop_(kTickMs) {}

  Status start() {
    // First, because threads inherit the mask.
    RETURN_IF_ERROR(loop_.watch_signals({SIGTERM, SIGINT},
                                        [this](int s) { asked_to_end(s); }));
    const bool was_run = rundir::is_run(options_.run_dir);
    Status opened = open();
    if (!opened.ok() && !was_run && lock_)
      rundir::remove_unstarted(*fs_, options_.run_dir);
    return opened;
  }

  const std::string& address() const override { return address_; }
  const std::string& message() const override { return message_; }

  int run() override {
    loop_.watch(server_->fd(), [this] { drain(); });
    loop_.watch(server_->lost_fd(), [this] { take_lost(); });
    loop_.watch(scanner_->fd(), [this] { take_scan(); });
    loop_.on_tick([this] { tick(); });
    tell_changes();
    execute(core_->start(monotonic_ms()));
    const int code = ended_ ? code_ : loop_.run();
    log_->info("coordinator_ends", {{"code", code}, {"why", message_}});
    log_->flush();
    // While the job continues, the next coordinator uses the same port.
    if (code == kExitOk || code == kExitFailed)
      rundir::remove_endpoint(*fs_, options_.run_dir);
    return code;
  }

 private:
  Status open() {
    RETURN_IF_ERROR(rundir::create(options_.run_dir));
    ASSIGN_OR_RETURN(lock_, rundir::RunLock::acquire(options_.run_dir));
    ASSIGN_OR_RETURN(
        change_,
        rundir::check_job(*fs_, options_.job, options_.set, options_.run_dir));
    RETURN_IF_ERROR(open_files());
    RETURN_IF_ERROR(check_not_ended());
    RETURN_IF_ERROR(open_socket());
    scanner_ = std::make_unique<Scanner>(rundir::checkpoints_path(
        options_.run_dir, options_.job.checkpoint().folder()));
    syncer_ = std::make_unique<Syncer>(
        std::vector<int>{metrics_->sync_fd(), events_->sync_fd()},
        kSyncPeriodMs);
    make_core();
    return ok_status();
  }

  Status check_not_ended() const {
    if (options_.resume || !journal_->restored() ||
        !core::terminal(journal_->restored()->phase()))
      return ok_status();
    const auto end = rundir::end_of_run(options_.run_dir);
    return ended(options_.run_dir + ": " +
                 (end ? rundir::end_text(*end, options_.run_dir)
                      : "the run has ended; to continue: remesh resume " +
                            options_.run_dir));
  }

  // What the run continues with is part of its history.
  void tell_changes() {
    for (const auto& [kind, text] :
         {std::pair{&events::kJobChanged, change_.keys},
          std::pair{&events::kLearningRateChanged, change_.learning_rate}}) {
      if (text.empty()) continue;
      pb::EventRecord e;
      e.set_generation(journal_->restored() ? journal_->restored()->generation()
                                            : 0);
      e.set_event(kind->name);
      e.set_step(rundir::last_finished_step(options_.run_dir));
      e.set_detail(text);
      act(core::EmitEvent{std::move(e)});
    }
    flush_lines();
  }

  Status open_files() {
    const std::string& run = options_.run_dir;
    ASSIGN_OR_RETURN(log_,
                     Logger::open({.name = "coordinator",
                                   .path = rundir::coordinator_log_path(run),
                                   .to_stderr = options_.log_to_stderr}));
    ASSIGN_OR_RETURN(journal_, Journal::open(*fs_, rundir::journal_path(run)));
    ASSIGN_OR_RETURN(metrics_,
                     rundir::LineFile::open(
                         rundir::metrics_path(run), [](std::string_view line) {
                           return rundir::parse_metrics_line(line).ok();
                         }));
    ASSIGN_OR_RETURN(events_,
                     rundir::LineFile::open(
                         rundir::events_path(run), [](std::string_view line) {
                           return rundir::parse_event_line(line).ok();
                         }));
    for (const auto* file : {metrics_.get(), events_.get()}) {
      if (file->cut_bytes() > 0) {
        log_->warn("torn_tail_removed", {{"bytes", file->cut_bytes()}});
      }
    }
    return ok_status();
  }

  // The job is written once the address is free, and before anybody is told.
  Status open_socket() {
    std::string previous;
    if (const auto e = rundir::read_endpoint(options_.run_dir); e.ok()) {
      previous = e.value().bound;
    }
    ASSIGN_OR_RETURN(
        server_, listen(options_.bind, previous, kListenPatienceMs, sleep_ms));
    RETURN_IF_ERROR(rundir::write_job(*fs_, options_.job, options_.run_dir));
    const std::string host = host_name();
    address_ = advertised_address(server_->address(), options_.advertise, host);
    return rundir::write_endpoint(*fs_, options_.run_dir,
                                  {.address = address_,
                                   .host = host,
                                   .pid = getpid(),
                                   .bound = server_->address()});
  }

  void make_core() {
    core::Options o;
    o.job = options_.job;
    o.run_dir = options_.run_dir;
    o.host = host_name();
    o.pid = getpid();
    o.address = address_;
    o.resume = options_.resume;
    o.restored = journal_->restored();
    o.epoch_floor = static_cast<uint64_t>(unix_seconds() * 1000);
    o.unix_offset_s =
        unix_seconds() - static_cast<double>(monotonic_ns()) * 1e-9;
    if (const auto last = rundir::parse_metrics_line(metrics_->last_line());
        last.ok()) {
      o.last_finished_step = last.value().step();
      o.last_metrics = last.value();
    }
    o.first_steps = first_steps(rundir::metrics_path(options_.run_dir));
    log_->info("coordinator_starts", {{"job", o.job.job().name()},
                                      {"run_dir", o.run_dir},
                                      {"address", address_},
                                      {"pid", o.pid},
                                      {"last_step", o.last_finished_step},
                                      {"restarted", o.restored.has_value()}});
    core_ = std::make_unique<core::Coordinator>(std::move(o));
  }

  // ----------------------------------------------------------------- events

  void asked_to_end(int signal) {
    message_ =
        fmt::format("signal {}: the daemon exits, the job continues", signal);
    end(-signal);
  }

  void tick() {
    const int64_t now = monotonic_ms();
    drain();
    take_lost();
    if (now - ticked_ms_ < kTickMs / 2) return;
    ticked_ms_ = now;
    give(core::Tick{});
  }

  void drain() {
    while (!ended_) {
      auto received = server_->receive();
      if (!received) return;
      handle(received->peer, received->envelope);
    }
  }

  void handle(const wire::PeerId& peer, const pb::Envelope& envelope) {
    const std::string& job = options_.job.job().name();
    if (!envelope.job().empty() && envelope.job() != job) {
      refuse_other_job(peer, envelope);
      return;
    }
    switch (envelope.body_case()) {
      case pb::Envelope::kReport:
        note_peer(peer, envelope.report());
        give(core::ReportReceived{envelope.report()});
        break;
      case pb::Envelope::kFenceIn:
        give(core::FenceReceived{envelope.fence_in()});
        break;
      case pb::Envelope::kCommand: {
        const uint64_t token = ++tokens_;
        clients_[token] = {peer, envelope.command().id()};
        give(core::CommandReceived{token, envelope.command()});
        break;
      }
      default:  // messages that only a coordinator sends
        break;
    }
  }

  void refuse_other_job(const wire::PeerId& peer,
                        const pb::Envelope& envelope) {
    const std::string error =
        fmt::format("this coordinator runs job \"{}\", not \"{}\"",
                    options_.job.job().name(), envelope.job());
    if (refused_.insert(peer).second) {
      log_->warn("other_job_refused", {{"job", envelope.job()},
                                       {"worker", envelope.report().worker()},
                                       {"host", envelope.report().host()}});
    }
    pb::Envelope out;
    if (envelope.has_command()) {
      pb::Reply* reply = out.mutable_reply();
      reply->set_id(envelope.command().id());
      reply->set_ok(false);
      reply->set_error(error);
      reply->set_code(code_name(Code::kInvalidArgument));
    } else {
      out.mutable_refusal()->set_reason(error);
    }
    server_->send(peer, out);
  }

  // The newest message of a worker's newest incarnation has its address.
  void note_peer(const wire::PeerId& peer, const pb::Report& report) {
    Place& place = places_[report.worker()];
    if (std::pair(report.incarnation(), report.seq()) <
        std::pair(place.incarnation, place.seq)) {
      return;
    }
    place = {peer, report.incarnation(), report.seq()};
  }

  void take_lost() {
    for (const wire::PeerId& peer : server_->take_lost()) {
      refused_.erase(peer);
      std::erase_if(clients_,
                    [&](const auto& c) { return c.second.peer == peer; });
      std::vector<std::string> workers;
      for (const auto& [name, place] : places_) {
        if (place.peer == peer) workers.push_back(name);
      }
      for (std::string& name : workers) give(core::PeerLost{std::move(name)});
    }
  }

  void take_scan() {
    if (const auto note = scanner_->take_note()) {
      log_->error("scan_failed", {{"cause", *note}});
      pb::EventRecord e;
      e.set_time(unix_seconds());
      e.set_event(events::kScanFailed.name);
      e.set_cause(*note);
      event_lines_ += rundir::event_line(e) + "\n";
      if (!flush_lines()) return;
    }
    if (auto scan = scanner_->take()) give(std::move(*scan));
  }

  void give(const core::Input& event) {
    if (!ended_) execute(core_->on(event, monotonic_ms()));
  }

  // ---------------------------------------------------------------- actions

  // In order. Lines are collected and written before any message that may
  // depend on them is sent.
  void execute(const std::vector<core::Action>& actions) {
    for (const core::Action& action : actions) {
      const bool line = std::holds_alternative<core::AppendMetrics>(action) ||
                        std::holds_alternative<core::EmitEvent>(action);
      if (!line && !flush_lines()) return;
      std::visit([this](const auto& a) { act(a); }, action);
      if (ended_) break;
    }
    flush_lines();
  }

  void act(const core::Persist& a) {
    persistently("journal", [&] { return journal_->persist(a.durable); });
  }

  void act(const core::SendDirective& a) {
    pb::Envelope out;
    *out.mutable_directive() = a.directive;
    send_to_worker(a.directive.worker(), std::move(out));
  }

  void act(const core::SendFence& a) {
    pb::Envelope out;
    *out.mutable_fence_out() = a.fence;
    send_to_worker(a.worker, std::move(out));
  }

  void act(const core::Respond& a) {
    const auto client = clients_.find(a.client);
    if (client == clients_.end()) return;  // has disconnected
    pb::Envelope out;
    *out.mutable_reply() = a.reply;
    out.mutable_reply()->set_id(client->second.id);
    out.set_job(options_.job.job().name());
    server_->send(client->second.peer, out);
    clients_.erase(client);
  }

  void act(const core::EmitEvent& a) {
    pb::EventRecord record = a.record;
    if (!record.has_time()) record.set_time(unix_seconds());
    log_->info(record.event(), rundir::event_fields(record));
    event_lines_ += rundir::event_line(record) + "\n";
  }

  void act(const core::AppendMetrics& a) {
    metric_lines_ += rundir::metrics_line(a.metrics) + "\n";
  }

  void act(const core::ScanCheckpoints&) { scanner_->request(); }

  void act(const core::Exit& a) {
    message_ = a.message;
    end(a.code);
  }

  void send_to_worker(const std::string& worker, pb::Envelope out) {
    const auto place = places_.find(worker);
    if (place == places_.end()) return;  // has not reported yet
    out.set_job(options_.job.job().name());
    // The core repeats messages, so a failure to send does not matter.
    server_->send(place->second.peer, out);
  }

  // False if writing fails for kWriteRetryMs; the daemon then exits.
  template <typename Write>
  bool persistently(const char* what, const Write& write) {
    const int64_t begin = monotonic_ms();
    for (;;) {
      const Status status = write();
      if (status.ok()) return true;
      log_->error("write_failed",
                  {{"what", what}, {"cause", status.message()}});
      if (monotonic_ms() - begin >= kWriteRetryMs) {
        message_ = "cannot write: " + status.message();
        end(kExitTryAgain);
        return false;
      }
      sleep_ms(kWritePauseMs);
    }
  }

  bool flush_lines() {
    if (metric_lines_.empty() && event_lines_.empty()) return !ended_;
    const bool ok =
        persistently("metrics",
                     [&] { return append(*metrics_, metric_lines_); }) &&
        persistently("events", [&] { return append(*events_, event_lines_); });
    if (ok) syncer_->touch();
    return ok && !ended_;
  }

  static Status append(rundir::LineFile& file, std::string& lines) {
    if (lines.empty()) return ok_status();
    RETURN_IF_ERROR(file.append(lines));
    lines.clear();
    return ok_status();
  }

  void end(int code) {
    if (ended_) return;
    ended_ = true;
    code_ = code;
    loop_.stop(code);
  }

  struct Place {
    wire::PeerId peer;
    uint64_t incarnation = 0;
    uint64_t seq = 0;
  };
  struct Asker {
    wire::PeerId peer;
    uint64_t id = 0;
  };

  DaemonOptions options_;
  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  std::unique_ptr<rundir::RunLock> lock_;
  rundir::JobChange change_;
  std::shared_ptr<Logger> log_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<rundir::LineFile> metrics_;
  std::unique_ptr<rundir::LineFile> events_;
  std::unique_ptr<wire::Server> server_;
  std::unique_ptr<Scanner> scanner_;
  std::unique_ptr<Syncer> syncer_;  // after the files it syncs
  wire::Loop loop_;
  std::unique_ptr<core::Coordinator> core_;

  std::string address_;
  std::map<std::string, Place> places_;  // by worker
  std::map<uint64_t, Asker> clients_;    // by token
  uint64_t tokens_ = 0;
  std::set<wire::PeerId> refused_;
  std::string metric_lines_;
  std::string event_lines_;
  int64_t ticked_ms_ = 0;
  bool ended_ = false;
  int code_ = 0;
  std::string message_;
};

}  // namespace

Result<std::unique_ptr<Daemon>> Daemon::open(DaemonOptions options) {
  auto daemon = std::make_unique<DaemonImpl>(std::move(options));
  RETURN_IF_ERROR(daemon->start());
  return std::unique_ptr<Daemon>(std::move(daemon));
}

}  // namespace remesh::server
