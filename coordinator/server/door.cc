#include "coordinator/server/door.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"
#include "proto/rundir/events.h"

namespace remesh::server {
namespace {

constexpr double kLookEveryS = 0.5;
constexpr size_t kMaxMembers = 65'536;
constexpr size_t kManyMembers = 1024;
constexpr double kForgottenAfterS = 600;
constexpr double kClockJumpsS = 30;
constexpr size_t kMostName = 64;         // characters of what others sent
constexpr int64_t kClocksDifferS = 600;  // at most, of two hosts

using google::protobuf::FieldDescriptor;

// The field of the envelope that has the message; nullptr: none.
const FieldDescriptor* body_of(const pb::Envelope& e) {
  return e.GetReflection()->GetOneofFieldDescriptor(
      e, e.GetDescriptor()->FindOneofByName("body"));
}

// The role that may send it; "": none.
std::string sender_of(const pb::Envelope& e) {
  const FieldDescriptor* f = body_of(e);
  return f == nullptr ? "" : f->options().GetExtension(pb::sent_by);
}

bool may_say(const std::string& role, const pb::Envelope& e) {
  if (role == "viewer") return e.command().kind() == pb::Command::STATUS;
  return !role.empty() && role == sender_of(e);
}

bool matches(const std::string& pattern, const std::string& worker) {
  return fnmatch(pattern.c_str(), worker.c_str(), 0) == 0;
}

// `ahead_s`: the clock of a worker's host, of this one's.
Status wrong_clock(double ahead_s) {
  return unavailable(fmt::format(
      "the clock of the worker's host is {} {} that of the coordinator's; set "
      "the wrong one right",
      format_duration(std::abs(ahead_s)), ahead_s < 0 ? "behind" : "ahead of"));
}

// The name that each message of a worker has; "": it is not a worker's.
std::string worker_of(const pb::Envelope& e) {
  if (sender_of(e) != "worker") return "";
  const auto& body = e.GetReflection()->GetMessage(e, body_of(e));
  return body.GetReflection()->GetString(
      body, body.GetDescriptor()->FindFieldByName("worker"));
}

}  // namespace

pb::Envelope answer_to_refused(const pb::Envelope& message,
                               const pb::Refusal& why) {
  pb::Envelope out;
  if (!message.has_command()) {
    *out.mutable_refusal() = why;
    return out;
  }
  pb::Reply* reply = out.mutable_reply();
  reply->set_id(message.command().id());
  reply->set_ok(false);
  reply->set_error(why.reason());
  reply->set_code(code_name(Code::kInvalidArgument));
  return out;
}

Result<std::unique_ptr<Door>> Door::open(FileSystem& fs, Options options) {
  std::unique_ptr<Door> door(new Door(std::move(options)));
  const Options& o = door->options_;
  if (o.no_auth) return door;
  ASSIGN_OR_RETURN(const bool has_keys, rundir::has_keys(fs, o.run));
  if (!has_keys) {
    if (!o.make)
      return not_found(fmt::format(
          "{}: has no keys, and without them whoever reaches the port controls "
          "the job. Make them with: remesh key new coordinator head {}; or, on "
          "a network of your own, start both sides with --no-auth",
          o.run, rundir::typed_path(o.run)));
    RETURN_IF_ERROR(rundir::make_keys(fs, o.run));
    door->made_ = true;
  }
  RETURN_IF_ERROR(rundir::promote_next_key(fs, o.run));
  ASSIGN_OR_RETURN(const wire::KeyFile own,
                   wire::read_key_file(rundir::key_path(o.run, "coordinator")));
  door->own_ = own.pair;
  RETURN_IF_ERROR(door->take(look(o.run, "")));
  return door;
}

std::optional<wire::ServerKeys> Door::server_keys() {
  if (no_auth()) return std::nullopt;
  return wire::ServerKeys{.own = own_,
                          .enrol = [this](const auto& key, const auto& ticket) {
                            return enrol(key, ticket, unix_seconds());
                          }};
}

void Door::attach(wire::Server* server, double unix_s) {
  server_ = server;
  if (!no_auth()) {
    publish(unix_s);
  } else {
    options_.log->warn("no_auth", {{"risk",
                                    "whoever reaches the port controls the "
                                    "job"}});
  }
}

void Door::remove_made_keys(FileSystem& fs) const {
  if (made_) (void)remove_all(fs, rundir::keys_path(options_.run)).ok();
}

// Reads the files if their sizes and times are not those of `stamp`.
Door::Files Door::look(const std::string& run, const std::string& stamp) {
  Files out;
  const std::string next = rundir::next_key_path(run);
  for (const std::string& path : {rundir::allowed_path(run), next}) {
    struct stat st {};
    if (stat(path.c_str(), &st) == 0)
      out.stamp += fmt::format("{}.{} {} {}", st.st_mtim.tv_sec,
                               st.st_mtim.tv_nsec, st.st_size, st.st_ino);
    out.stamp += '\n';
  }
  if (out.stamp == stamp) return out;
  out.listed = rundir::read_allowed(run);
  if (const auto file = wire::read_key_file(next); file.ok())
    out.next_key = file->pair.public_key;
  return out;
}

Status Door::take(const Files& files) {
  stamp_ = files.stamp;
  if (server_ != nullptr && !files.next_key.empty())
    server_->announce(files.next_key);
  if (!files.listed.ok()) stamp_.clear();  // try again
  RETURN_IF_ERROR(files.listed.status());
  std::erase_if(members_,
                [](const auto& m) { return m.second.joined_by.empty(); });
  for (const rundir::AllowedKey& k : *files.listed)
    members_[k.public_key] = {k, ""};
  return ok_status();
}

// Each life of a worker with a job secret makes a key. Those of the dead are
// forgotten when there are many; a worker that returns after so long joins
// again.
bool Door::forget_joined(double unix_s) {
  // The clock was set, or this process was stopped: all have their time again.
  const bool jumped =
      std::abs(unix_s - std::exchange(refreshed_s_, unix_s)) > kClockJumpsS;
  for (auto& [key, m] : members_)
    if (std::exchange(m.seen, false) || jumped) m.seen_s = unix_s;
  if (members_.size() < kManyMembers) return false;
  return std::erase_if(members_, [&](const auto& entry) {
           const Member& m = entry.second;
           return !m.joined_by.empty() &&
                  (unix_s - m.seen_s > kForgottenAfterS || !good(m, unix_s));
         }) > 0;
}

std::vector<std::string> Door::refresh(double unix_s) {
  if (server_ != nullptr) server_->close_offenders();
  if (no_auth()) return {};
  // The clock may have been set back.
  bool changed = unix_s >= next_expiry_s_ || unix_s < last_expiry_s_;
  changed = forget_joined(unix_s) || changed;
  if (look_ && look_->done) {
    const auto found = std::exchange(look_, nullptr);
    ++scans_;
    if (found->result.stamp != stamp_) {
      changed = true;
      const std::string before = problem_;
      problem_ = take(found->result).message();
      if (problem_ != before && !problem_.empty())
        options_.log->error("keys_unreadable", {{"cause", problem_}});
    }
  }
  if (!look_ && std::abs(unix_s - looked_s_) >= kLookEveryS) {
    looked_s_ = unix_s;
    look_ = Background<Files>::start(
        [run = options_.run, stamp = stamp_] { return look(run, stamp); });
  }
  return changed ? publish(unix_s) : std::vector<std::string>();
}

const Door::Member* Door::find(const std::string& key) const {
  const auto it = members_.find(key);
  return it == members_.end() ? nullptr : &it->second;
}

bool Door::good(const Member& m, double unix_s) const {
  if (m.joined_by.empty()) return m.key.good_at(unix_s);
  const Member* by = find(m.joined_by);
  return by != nullptr && by->key.good_at(unix_s);
}

std::vector<std::string> Door::publish(double unix_s) {
  std::set<std::string> now;
  next_expiry_s_ = std::numeric_limits<double>::infinity();
  last_expiry_s_ = 0;
  for (const auto& [key, m] : members_) {
    const auto expires = static_cast<double>(m.key.expires);
    if (!m.key.good_at(unix_s))
      last_expiry_s_ = std::max(last_expiry_s_, expires);
    else if (expires != 0)
      next_expiry_s_ = std::min(next_expiry_s_, expires);
    if (good(m, unix_s)) now.insert(key);
  }
  if (now == good_) return {};
  std::vector<std::string> gone;
  std::set_difference(good_.begin(), good_.end(), now.begin(), now.end(),
                      std::back_inserter(gone));
  good_ = std::move(now);
  server_->allow(good_);
  return gone;
}

Status Door::enrol(const std::string& key, const wire::Ticket& t,
                   double unix_s) {
  const Member* by = find(key);
  if (by == nullptr || by->key.role != "join" || good_.count(key) == 0)
    return invalid_argument("this key is not a job secret (role join)");
  const int64_t now = static_cast<int64_t>(unix_s);
  if (t.expires < now - kClocksDifferS ||
      t.expires > now + wire::kTicketGoodForS + kClocksDifferS)
    return wrong_clock(static_cast<double>(t.expires) - wire::kTicketGoodForS -
                       unix_s);
  if (!t.job.empty() && t.job != options_.job)
    return invalid_argument(fmt::format(
        "the ticket is for job \"{}\", not \"{}\"", t.job, options_.job));
  if (!limits::valid_name(t.worker))
    return invalid_argument("the ticket has no valid name of a worker");
  if (!tickets_.admits(key, now * 1000))
    return exhausted("too many tickets of this job secret at once");
  if (!matches(by->key.workers, t.worker))
    return invalid_argument(
        fmt::format("the job secret does not admit a worker \"{}\", only {}",
                    t.worker, by->key.workers));
  const Member* known = find(t.public_key);
  if (known != nullptr) {
    // The same worker with the secret that took the place of its own.
    const bool moved =
        known->joined_by == by->key.replaces || !good(*known, unix_s);
    if (known->joined_by.empty() || known->key.workers != t.worker ||
        (known->joined_by != key && !moved))
      return already_exists("this key has another role");
  }
  if (known == nullptr && members_.size() >= kMaxMembers)
    return exhausted("too many keys; restart the coordinator");
  members_[t.public_key] = {{.public_key = t.public_key,
                             .role = "worker",
                             .name = t.worker,
                             .workers = t.worker},
                            key};
  if (good_.insert(t.public_key).second) server_->admit(t.public_key);
  return ok_status();
}

std::optional<pb::Refusal> Door::judge(const std::string& key,
                                       const pb::Envelope& message,
                                       const core::Coordinator& core) const {
  pb::Refusal out;
  if (!message.job().empty() && message.job() != options_.job) {
    out.set_kind(pb::Refusal::OTHER_JOB);
    out.set_reason(fmt::format("this coordinator runs job \"{}\", not \"{}\"",
                               options_.job,
                               limits::printable(message.job(), kMostName)));
    return out;
  }
  out.set_reason(why_refused(key, message));
  out.set_kind(pb::Refusal::PERMANENT);
  if (!out.reason().empty()) return out;
  if (no_auth() || message.has_command()) return std::nullopt;
  const std::string worker = worker_of(message);
  const core::Claim right = claim(key, core.owners().owner_of(worker));
  if (core.owners().may_use(worker, key, right, core.roster()))
    return std::nullopt;
  out.set_reason("this worker name belongs to another key");
  out.set_kind(right == core::Claim::kNone ? pb::Refusal::PERMANENT
                                           : pb::Refusal::RETRY);
  return out;
}

std::string Door::why_refused(const std::string& key,
                              const pb::Envelope& e) const {
  if (no_auth()) return "";
  const Member* m = find(key);
  if (m == nullptr || good_.count(key) == 0)
    return "this key is not allowed: " + key;
  m->seen = true;
  if (!may_say(m->key.role, e))
    return fmt::format("the key \"{}\" has the role {}, which may not {}",
                       m->key.name, m->key.role,
                       e.has_command() ? "send this command" : "be a worker");
  if (e.has_command()) return "";
  const bool exact = !m->joined_by.empty();
  if (exact ? m->key.workers == worker_of(e)
            : matches(m->key.workers, worker_of(e)))
    return "";
  return fmt::format("the key \"{}\" may not use this worker name, only {}",
                     m->key.name, m->key.workers);
}

core::Claim Door::claim(const std::string& key,
                        const std::string& owner) const {
  const Member* m = find(key);
  if (m == nullptr) return core::Claim::kNone;
  if (!owner.empty() && m->key.replaces == owner) return core::Claim::kNow;
  const Member* before = find(owner);
  const bool joined_alike = before != nullptr && !m->joined_by.empty() &&
                            before->joined_by == m->joined_by;
  return good_.count(owner) == 0 || joined_alike ? core::Claim::kWhenDead
                                                 : core::Claim::kNone;
}

std::optional<pb::EventRecord> Door::refusal_event(const pb::Envelope& message,
                                                   const pb::Refusal& why,
                                                   double unix_s) {
  const std::string name = limits::printable(worker_of(message), kMostName);
  options_.log->warn("refused",
                     {{"why", why.reason()},
                      {"job", limits::printable(message.job(), kMostName)},
                      {"worker", name}});
  if (message.has_command() || std::abs(unix_s - told_s_) < 1)
    return std::nullopt;
  told_s_ = unix_s;
  pb::EventRecord e;
  e.set_time(unix_s);
  e.set_event(events::kWorkerRefused.name);
  e.set_worker(name);
  e.set_cause(why.reason());
  return e;
}

}  // namespace remesh::server
