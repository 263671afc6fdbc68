// How a worker finds its coordinator, and with which keys it talks to it.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"
#include "worker/agent/shell/probe.h"
#include "worker/agent/shell/worker.h"

namespace remesh::agent {
namespace {

// A coordinator that is silent this long may have moved to another address.
constexpr int64_t kLookAgainMs = 500;
// The same for an address that was given.
constexpr int64_t kMovedMs = 5000;
// A replaced key, and one that was allowed later, is noticed within this time.
constexpr int64_t kKeysMs = 1000;
// A run that has ended and has no coordinator for this long is not resumed now.
constexpr int64_t kEndedMs = 2000;

Route find_route(const std::string& address) {
  return {wire::has_only_ipv6(address), network_towards(address)};
}

}  // namespace

void Worker::connect() {
  heard_ms_ = monotonic_ms();
  const auto address = coordinator_.read();
  if (!address.ok()) {
    if (address_.empty() && !std::exchange(waits_, true))
      log_->info("waiting_for_coordinator",
                 {{"reason", address.status().message()}});
    return;
  }
  keys_ = wire::choose_keys(key_choice());
  address_ = *address;
  // Nobody waits for this worker yet.
  open_client(find_route(address_));
}

wire::KeyChoice Worker::key_choice() const {
  return {.run = coordinator_.run(),
          .member = "worker",
          .key = options_.key,
          .server = options_.server_key,
          .no_auth = options_.no_auth,
          .own = own_,
          .worker = options_.name,
          .job = options_.job};
}

// Keys that cannot be read now do not replace those that could. A server's key
// alone changes when the coordinator restarts, which has told the client.
void Worker::take_keys(const Keys& keys, int64_t now_ms) {
  if (!keys.ok() && keys_.ok()) return;
  keys_ = keys;
  if (!client_ || !keys.ok() || *keys == used_) return;
  // A job secret that was rotated is presented while the old one is good.
  const bool same = keys->has_value() && used_ && (*keys)->own == used_->own &&
                    (*keys)->enrolment == used_->enrolment;
  if (same && now_ms - heard_ms_ < kLookAgainMs) return;
  open_next(*keys);
}

// A connection that this end closes is a loss to the coordinator, so it waits
// as long for a sign of it as the coordinator does for one of the worker.
void Worker::be_as_patient(int64_t dead_after_ms) {
  constexpr int64_t kMostMs = 3'600'000;
  const auto ms = static_cast<int>(
      std::clamp<int64_t>(dead_after_ms, wire::kSilenceMs, kMostMs));
  if (std::exchange(silence_ms_, ms) != ms && client_) open_next(used_);
}

void Worker::open_next(const std::optional<wire::ClientKeys>& keys) {
  auto next = wire::Client::connect(address_, keys, only_ipv6_, silence_ms_);
  if (!next.ok()) return;
  next_ = std::move(next).value();
  used_ = keys;
}

// The next connection takes over once it is open, and the one before ends when
// the coordinator has answered: it must not miss the worker.
void Worker::use_next_client() {
  if (!next_) return;
  (void)next_->receive();
  if (!next_->connected()) return;
  log_->info("connection_replaced",
             {{"coordinator", address_},
              {"key", used_ ? used_->own.public_key : "none"},
              {"silence_ms", silence_ms_}});
  if (client_) loop_.unwatch(client_->fd());
  former_ = std::exchange(client_, std::move(next_));
  loop_.watch(client_->fd(), [this] { on_message(); });
}

void Worker::connect_to(const std::string& address) {
  if ((client_ || route_) && address == address_) return;
  disconnect();
  address_ = address;
  route_ = Background<Route>::start([address] { return find_route(address); });
}

void Worker::open_client(const Route& route) {
  only_ipv6_ = route.only_ipv6;
  auto client =
      keys_.ok()
          ? wire::Client::connect(address_, *keys_, only_ipv6_, silence_ms_)
          : Result<std::unique_ptr<wire::Client>>(keys_.status());
  if (!client.ok()) {
    log_->error("connect_failed", {{"error", client.status().message()}});
    // A fixed address cannot become valid, and nobody answers without a key.
    if (coordinator_.run().empty() || !keys_.ok()) {
      exit_message_ = client.status().message();
      exit_code_ = kExitUsage;
    }
    return;
  }
  client_ = std::move(client).value();
  used_ = *keys_;
  loop_.watch(client_->fd(), [this] { on_message(); });
  if (options_.interface.empty()) launcher_->set_tcp_interfaces(route.network);
  log_->info("connecting", {{"coordinator", address_}});
}

void Worker::disconnect() {
  next_.reset();
  former_.reset();
  if (!client_) return;
  loop_.unwatch(client_->fd());
  client_.reset();
}

// The coordinator may have moved to another host, even if an address was given.
void Worker::look_for_coordinator(int64_t now_ms) {
  use_next_client();
  if (route_ && route_->done)
    open_client(std::exchange(route_, nullptr)->result);
  if (lookup_ && lookup_->done) {
    const auto done = std::exchange(lookup_, nullptr);
    take_keys(done->result.keys, now_ms);
    if (done->result.run && now_ms - heard_ms_ >= kLookAgainMs)
      on_lookup(*done->result.run, now_ms);
  }
  const bool silent =
      !coordinator_.run().empty() &&
      now_ms - heard_ms_ >= (coordinator_.fixed() ? kMovedMs : kLookAgainMs);
  if (lookup_ || (!silent && now_ms - looked_ms_ < kKeysMs)) return;
  looked_ms_ = now_ms;
  lookup_ = Background<Lookup>::start([silent, choice = key_choice()] {
    Lookup out;
    if (silent) out.run = look_up(choice.run);
    out.keys = wire::choose_keys(choice);
    return out;
  });
}

void Worker::on_lookup(const RunLookup& found, int64_t now_ms) {
  heard_ms_ = now_ms;
  if (found.address.ok()) {
    if (route_) return;  // not found yet
    // The address given may be a tunnel's: try both in turn.
    const bool moved = *found.address != address_ || !coordinator_.fixed();
    return connect_to(moved ? *found.address : *coordinator_.read());
  }
  if (now_ms - answered_ms_ < kEndedMs ||
      found.outcome == pb::JobStatus::UNKNOWN)
    return;
  const std::string& run = coordinator_.run();
  feed(RunEnded{
      fmt::format("{}: the run has ended ({}); continue it with "
                  "`remesh resume {}`, then start the worker again",
                  run, enum_text(pb::JobStatus::State_Name(found.outcome)),
                  shell_quoted(run)),
      found.outcome == pb::JobStatus::DONE});
}

void Worker::watch_silence(int64_t now_ms) {
  if (probe_ && probe_->done) {
    log_->warn("no_coordinator",
               {{"coordinator", address_},
                {"silent_s", (now_ms - answered_ms_) / 1000},
                {"reason", probe_->result},
                {"next", "still trying; Ctrl-C or SIGTERM to leave"}});
    probe_.reset();
  }
  check_wire_version();
  check_key();
  if (!client_ || probe_ || !silence_.due(answered_ms_, now_ms)) return;
  std::string why = client_->trouble();
  if (why.empty() && client_->connected()) why = refusal_;
  probe_ = Background<std::string>::start(
      [address = address_, why = std::move(why)] {
        return why.empty() ? why_no_answer(address) : why;
      });
}

void Worker::check_wire_version() {
  const auto theirs = client_ ? client_->foreign_version() : std::nullopt;
  if (!theirs) return;
  // It counts as the coordinator of another job.
  feed(Refused{
      .reason = fmt::format("the coordinator at {} speaks version {} of the "
                            "protocol and this worker version {}; install the "
                            "same release of remesh on both",
                            address_, *theirs, wire::kVersion),
      .kind = pb::Refusal::OTHER_JOB});
}

void Worker::check_key() {
  if (!client_ || !client_->refused()) return;
  const std::string reason = client_->trouble();
  // Whoever has the address can refuse, with the coordinator's key or without,
  // so it counts as the coordinator of another job.
  note_refusal(pb::Refusal::OTHER_JOB, reason);
  feed(Refused{.reason = fmt::format("{}: {}", address_, reason),
               .kind = pb::Refusal::OTHER_JOB});
}

// It is repeated for each report: the log has each kind once.
void Worker::note_refusal(pb::Refusal::Kind kind, const std::string& reason) {
  refusal_ = reason;
  if (std::exchange(refused_, kind) != kind)
    log_->warn("refused", {{"reason", reason}});
}

}  // namespace remesh::agent
