#include "coordinator/server/daemon.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/known_runs.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/clients.h"
#include "coordinator/server/directive_sender.h"
#include "coordinator/server/door.h"
#include "coordinator/server/listen.h"
#include "coordinator/server/message_rates.h"
#include "coordinator/server/outbox.h"
#include "coordinator/server/pace.h"
#include "coordinator/server/run_files.h"
#include "coordinator/server/scanner.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/log.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"
#include "proto/wire/channel.h"
#include "proto/wire/loop.h"
#include "proto/wire/protocol.h"

namespace remesh::server {
namespace {

constexpr int kTickMs = 20;
constexpr int kListenPatienceMs = 5000;
constexpr int64_t kProbeMs = 500;
constexpr int64_t kFinishMs = 2000;  // for the last writes at the end

class DaemonImpl : public Daemon {
 public:
  explicit DaemonImpl(DaemonOptions options)
      : options_(std::move(options)), loop_(kTickMs) {}

  Status start() {
    // First, because threads inherit the mask.
    RETURN_IF_ERROR(loop_.watch_signals({SIGTERM, SIGINT},
                                        [this](int s) { asked_to_end(s); }));
    Status opened = open();
    if (!opened.ok() && files_->lock) {
      if (door_ && !files_->lock->was_run())
        door_->remove_made_keys(*files_->fs);
      files_->lock->remove_unstarted(*files_->fs);
    }
    return opened;
  }

  const std::string& address() const override { return address_; }
  const std::string& message() const override { return message_; }

  int run() override {
    loop_.watch(server_->fd(), [this] { receive_all(); });
    loop_.watch(server_->lost_fd(), [this] { take_lost(); });
    loop_.watch(scanner_->fd(), [this] { take_scan(); });
    loop_.watch(outbox_->fd(), [this] { take_written(); });
    loop_.on_tick([this] { tick(); });
    emit_job_changes();
    execute(core_->start(monotonic_ms()));
    const int code = ended_ ? code_ : loop_.run();
    log_->info("coordinator_ends", {{"code", code}, {"why", message_}});
    (void)log_->flush();
    // While the job continues, the next coordinator uses the same port.
    if (code == kExitOk || code == kExitFailed || code == kExitUsage)
      write("coordinator.addr", [](RunFiles& f) {
        rundir::remove_endpoint(*f.fs, f.run);
        return ok_status();
      });
    outbox_->finish(kFinishMs);
    return code;
  }

 private:
  Status open() {
    const std::string& run = options_.run_dir;
    ASSIGN_OR_RETURN(files_->lock, rundir::RunLock::acquire(run));
    RETURN_IF_ERROR(files_->lock->begin(*files_->fs));
    log_ = Logger::open({.name = "coordinator",
                         .path = rundir::coordinator_log_path(run),
                         .to_stderr = options_.log_to_stderr});
    RETURN_IF_ERROR(files_->open(run, *log_));
    if (!options_.resume) RETURN_IF_ERROR(files_->check_not_ended());
    ASSIGN_OR_RETURN(
        change_,
        rundir::check_job(*files_->fs,
                          {options_.job, options_.set, options_.accept_edits},
                          run, restored() ? &*restored() : nullptr));
    RETURN_IF_ERROR(files_->claim(options_.job, *log_));
    outbox_.emplace(Outbox::Options{.note = [log = log_](const Status& s) {
      if (s.ok()) return log->info("written_again");
      log->error("write_failed", {{"cause", s.message()}});
    }});
    RETURN_IF_ERROR(open_socket());
    scanner_ = std::make_unique<Scanner>(
        rundir::checkpoints_path(run, options_.job.checkpoint().folder()),
        files_->run_id);
    sender_.emplace(server_.get(), &*outbox_, options_.job.job().name());
    make_core();
    rundir::note_run(run);
    return ok_status();
  }

  bool job_ended() const { return core::terminal(core_->durable().phase()); }

  // What the journal had when it was opened.
  const std::optional<pb::Durable>& restored() const {
    return files_->journal->restored();
  }

  // What the run continues with is part of its history.
  void emit_job_changes() {
    for (pb::EventRecord& e : rundir::events_of(change_, options_.run_dir)) {
      e.set_generation(restored() ? restored()->generation() : 0);
      act(core::EmitEvent{std::move(e)});
    }
  }

  // The job is written once the address is free, and before anybody is told.
  // The address is not waited for if it is that of the previous coordinator.
  Status open_socket() {
    rundir::Endpoint previous;
    if (auto e = rundir::read_endpoint(options_.run_dir); e.ok())
      previous = std::move(*e);
    RETURN_IF_ERROR(check_addresses(options_.bind, options_.advertise));
    ASSIGN_OR_RETURN(
        door_, Door::open(*files_->fs, {.run = options_.run_dir,
                                        .job = options_.job.job().name(),
                                        .no_auth = options_.no_auth,
                                        .make = options_.make_keys ||
                                                is_loopback(options_.bind),
                                        .log = log_}));
    const auto dead_ms =
        static_cast<int>(options_.job.elastic().dead_after_ms());
    ASSIGN_OR_RETURN(server_, listen(
                                  options_.bind, previous.bound,
                                  door_->server_keys(), kListenPatienceMs,
                                  [](int ms) { usleep(ms * 1000); }, dead_ms));
    server_->limit([this](const wire::Received& r) {
      return rates_.admits(r, monotonic_ms());
    });
    door_->attach(server_.get(), unix_seconds());
    RETURN_IF_ERROR(rundir::write_job(*files_->fs, options_.job,
                                      options_.run_dir, files_->run_id));
    ASSIGN_OR_RETURN(address_,
                     advertised_address(server_->address(), options_.advertise,
                                        host_name()));
    rundir::Endpoint& endpoint = files_->endpoint;
    endpoint = {.address = address_,
                .host = host_identity(),
                .pid = getpid(),
                .bound = server_->address(),
                .no_auth = door_->no_auth(),
                .host_id = host_id()};
    const auto put = [](RunFiles& f) {
      return rundir::write_endpoint(*f.fs, f.run, f.endpoint);
    };
    previous.pid = endpoint.pid;
    if (previous != endpoint) return put(*files_);
    write("coordinator.addr", put);
    return ok_status();
  }

  void make_core() {
    core::Options o;
    o.job = options_.job;
    o.run_dir = options_.run_dir;
    o.host = host_identity();
    o.pid = getpid();
    o.address = address_;
    o.resume = options_.resume;
    o.core = options_.core;
    o.protocol = wire::own_protocol();
    o.no_auth = door_->no_auth();
    o.run_id = files_->run_id;
    o.secret = rundir::run_secret(*files_->fs, options_.run_dir);
    o.epoch_floor = static_cast<uint64_t>(unix_seconds() * 1000);
    o.unix_offset_s =
        unix_seconds() - static_cast<double>(monotonic_ns()) * 1e-9;
    files_->tell(&o);
    log_->info("coordinator_starts", {{"job", o.job.job().name()},
                                      {"run_dir", o.run_dir},
                                      {"address", address_},
                                      {"pid", o.pid},
                                      {"last_step", o.last_finished_step},
                                      {"restarted", o.restored.has_value()}});
    core_ = std::make_unique<core::Coordinator>(std::move(o));
  }

  // ----------------------------------------------------------------- events

  void asked_to_end(int s) {
    message_ = fmt::format("signal {}: the daemon exits, the job continues", s);
    end(-s);
  }

  void tick() {
    const int64_t now = monotonic_ms();
    receive_all();
    take_lost();
    if (now - ticked_ms_ < kTickMs / 2) return;
    ticked_ms_ = now;
    tell_dropped(now);
    // Workers whose key has lost its right are given up at once.
    for (const std::string& key : door_->refresh(unix_seconds()))
      for (std::string& worker : core_->owners().workers_of(key))
        dispatch(core::PeerLost{std::move(worker), "its key is not allowed"});
    probe_storage(now);
    const Outbox::Waited waited = outbox_->take_waited();
    dispatch(core::Tick{.unwritten_ms = waited.unwritten_ms,
                        .stalled_ms = waited.stalled_ms,
                        .backlog_full = outbox_->full(),
                        .synced_step = files_->syncer->synced_step()});
    sender_->poll(now);
    answer_waiting();
    tell_lost_events();
  }

  // Is the run still this coordinator's? Nothing else may be left to write.
  void probe_storage(int64_t now_ms) {
    if (now_ms - probed_ms_ < kProbeMs || !outbox_->written(outbox_->newest()))
      return;
    probed_ms_ = now_ms;
    write("coordinator.lock", [](RunFiles& f) { return f.check(); });
  }

  void receive_all() {
    ReceiveBudget budget(monotonic_ms());
    bool more = true;
    while (more && !ended_ && !budget.is_spent(monotonic_ms())) {
      const auto received = server_->receive();
      more = received.has_value();
      if (more && rates_.serves(*received, monotonic_ms())) handle(*received);
    }
    if (more) server_->receive_later();
    if (ended_ || !pacer_.is_due(monotonic_ns())) return;
    execute(core_->settle(monotonic_ms()));
    pacer_.done(monotonic_ns());
  }

  void tell_dropped(int64_t now_ms) {
    const uint64_t bad = server_->dropped_frames();
    const int version = server_->foreign_version().value_or(wire::kVersion);
    if (rates_.should_tell(bad, now_ms))
      log_->warn("messages_dropped",
                 {{"dropped", bad},
                  {"above_rate", rates_.over_rate()},
                  {"wire_version", version},
                  {"too_many_connections_of", server_->crowded_source()}});
  }

  void handle(const wire::Received& r) {
    if (const auto why = door_->judge(r.key, r.envelope, *core_))
      return refuse(r, *why);
    if (r.envelope.has_report()) return take_report(r);
    if (r.envelope.has_command()) return take_command(r);
    take(core::MessageReceived{r.envelope, r.key});
  }

  void take_command(const wire::Received& r) {
    const pb::Command& command = r.envelope.command();
    if (Clients::waits_for_end(command))
      return clients_.await_end(*server_, r.peer, command);
    const uint64_t token = clients_.add(r.peer, command);
    if (!clients_.asks_for_change(token))
      take(core::CommandReceived{token, command});
    else if (!declined(token, "nothing is changed"))
      dispatch(core::CommandReceived{token, command});
  }

  void refuse(const wire::Received& r, const pb::Refusal& why) {
    if (server_->is_connected(r.peer) && refused_.insert(r.peer).second)
      if (auto e = door_->refusal_event(r.envelope, why, unix_seconds()))
        execute({core::EmitEvent{std::move(*e)}});
    server_->send(r.peer, answer_to_refused(r.envelope, why));
  }

  // A worker is where its newest report that counts came from; that of a
  // refused report learns why.
  void take_report(const wire::Received& r) {
    if (ended_) return;
    const pb::Report& report = r.envelope.report();
    const auto actions =
        core_->take(core::MessageReceived{r.envelope, r.key}, monotonic_ms());
    if (core_->roster().newest_is(report))
      sender_->note(r.peer, report, [this](const std::string& name) {
        return core_->roster().find(name) != nullptr;
      });
    reporter_ = r.peer;
    execute(actions);
  }

  void take_lost() {
    for (const wire::PeerId& peer : server_->take_lost()) {
      refused_.erase(peer);
      rates_.forget(peer);
      clients_.forget(peer);
      for (std::string& name : sender_->workers_at(peer))
        take(core::PeerLost{std::move(name)});
    }
  }

  void take_scan() {
    if (auto note = scanner_->take_error())
      act(core::EmitEvent{std::move(*note)});
    if (auto scan = scanner_->take()) dispatch(std::move(*scan));
  }

  void take(const core::Input& event) {
    if (!ended_) execute(core_->take(event, monotonic_ms()));
  }

  void dispatch(const core::Input& event) {
    if (!ended_) execute(core_->on(event, monotonic_ms()));
  }

  // ---------------------------------------------------------------- actions

  // In order. What is written, and what may happen only then, goes through the
  // outbox.
  void execute(const std::vector<core::Action>& actions) {
    for (const core::Action& action : actions) {
      std::visit([this](const auto& a) { act(a); }, action);
      if (ended_) break;
    }
  }

  template <typename Write>
  void write(const std::string& file, Write write, size_t bytes = 0,
             uint64_t state = 0) {
    outbox_->write(
        file, [files = files_, write] { return write(*files); }, bytes, state);
  }

  void act(const core::Persist& a) {
    write(
        "journal",
        [durable = a.durable](RunFiles& f) { return f.persist(durable); },
        a.durable.SpaceUsedLong(), a.durable.epoch());
  }

  void act(const core::SendDirective& a) { sender_->send(a, monotonic_ms()); }

  void act(const core::SendFence& a) { sender_->send(a.worker, a.fence); }

  // Whoever asks for a change is answered when that is written.
  void act(const core::Respond& a) {
    if (!clients_.asks_for_change(a.client)) return respond(a.client, a.reply);
    outbox_->then([this, a] { respond(a.client, a.reply); });
  }

  // Whoever asks for a change learns why it is not written, instead of waiting.
  void answer_waiting() {
    for (const uint64_t token : clients_.wait_for_a_write())
      if (!declined(token, "what was asked is done when it can be written"))
        return;
  }

  // Asks for the problem once: the next write may succeed at any moment.
  bool declined(uint64_t token, const std::string& consequence) {
    const auto problem = outbox_->problem();
    if (!problem) return false;
    pb::Reply reply = not_now(*problem, consequence);
    *reply.mutable_status() = core_->status();
    respond(token, reply);
    return true;
  }

  void respond(uint64_t token, pb::Reply reply) {
    add_problems(reply.mutable_status());
    clients_.answer(token, std::move(reply), server_.get());
  }

  void add_problems(pb::JobStatus* status) const {
    if (const auto problem = outbox_->problem())
      *status->add_problems() = *problem;
    if (const auto problem = scanner_->problem())
      *status->add_problems() = *problem;
    for (const std::string& text :
         {files_->syncer->problem().value_or(""), door_->problem()})
      if (!text.empty()) status->add_problems()->set_text(text);
    status->set_run_dir_gone(files_->lock->gone());
  }

  void act(const core::Refuse& a) {
    pb::Envelope out;
    *out.mutable_refusal() = a.refusal;
    out.set_job(options_.job.job().name());
    server_->send(reporter_, out);
  }

  void act(const core::EmitEvent& a) {
    pb::EventRecord record = a.record;
    if (!record.has_time()) record.set_time(unix_seconds());
    log_->info(record.event(), rundir::event_fields(record));
    outbox_->write_line(
        "events.jsonl",
        [files = files_, record] { return files->append(record); },
        record.SpaceUsedLong(), /*keep=*/job_ended());
  }

  // The last event of a job that has ended is the one that says so.
  void tell_lost_events() {
    const int64_t lost = job_ended() ? 0 : outbox_->take_dropped();
    if (lost == 0) return;
    pb::EventRecord e;
    e.set_event(events::kEventsLost.name);
    e.set_detail(plural(lost, "event") +
                 "; logs/coordinator.log may have them");
    act(core::EmitEvent{std::move(e)});
  }

  void act(const core::AppendMetrics& a) {
    write(
        "metrics.jsonl", [m = a.metrics](RunFiles& f) { return f.append(m); },
        a.metrics.SpaceUsedLong());
  }

  void act(const core::ScanCheckpoints& a) {
    outbox_->then([this, step = a.saved_step] { scanner_->request(step); });
  }

  void act(const core::Exit& a) {
    outbox_->then([this, a] {
      message_ = a.message;
      pb::JobStatus last = core_->status();
      add_problems(&last);
      clients_.answer_at_end(std::move(last), server_.get());
      end(a.code);
    });
  }

  void take_written() {
    if (const auto refused = outbox_->refused()) {
      message_ = refused->message() + "; this one ends";
      return end(kExitTryAgain);
    }
    sender_->poll(monotonic_ms());
    outbox_->deliver();
  }

  void end(int code) {
    if (ended_) return;
    ended_ = true;
    code_ = code;
    loop_.stop(code);
  }

  DaemonOptions options_;
  std::shared_ptr<RunFiles> files_ = std::make_shared<RunFiles>();
  rundir::JobChange change_;
  std::shared_ptr<Logger> log_;
  std::optional<Outbox> outbox_;
  std::unique_ptr<Door> door_;
  std::unique_ptr<wire::Server> server_;  // after the door it asks
  std::optional<DirectiveSender> sender_;
  std::unique_ptr<Scanner> scanner_;
  wire::Loop loop_;
  std::unique_ptr<core::Coordinator> core_;
  std::string address_;
  wire::PeerId reporter_;  // of the last report
  Clients clients_{options_.job.job().name()};
  std::set<wire::PeerId> refused_;
  ReconcilePacer pacer_;
  int64_t ticked_ms_ = 0;
  int64_t probed_ms_ = 0;
  MessageRates rates_;
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
