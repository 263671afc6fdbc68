// Door: who may talk to the coordinator, and about what, by the keys of the run
// (coordinator/rundir/run_keys.h).
//
// A worker may report and take part in fences, a viewer may ask for the status,
// an operator may send every command, and the holder of a join key may have the
// key of a new worker admitted by a ticket, until the join key is no longer
// allowed or the coordinator restarts (the worker then asks again). Identity is
// the key that the connection was opened with, never what a message says.
//
// Threads: the owner's, and one that reads files.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "coordinator/rundir/run_keys.h"
#include "proto/base/background.h"
#include "proto/base/file_system.h"
#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::server {

class Door {
 public:
  struct Options {
    std::string run;
    std::string job;       // tickets for others are refused
    bool no_auth = false;  // everybody may say everything
    bool make = false;     // make keys if the run has none
    std::shared_ptr<Logger> log = Logger::null();
  };
  // Fails if the run has no keys and they are not to be made, and if they
  // cannot be read.
  static Result<std::unique_ptr<Door>> open(FileSystem& fs, Options options);

  bool no_auth() const { return options_.no_auth; }
  // After a failed start: what open() has made is removed.
  void remove_made_keys(FileSystem& fs) const;
  // For Server::bind; uses the door while the server lives.
  std::optional<wire::ServerKeys> server_keys();
  // Lets in who is allowed, from now on.
  void attach(wire::Server* server, double unix_s);
  // Has another thread look whether the keys changed, and reads them again.
  // Returns those that have lost their right since the last call.
  std::vector<std::string> refresh(double unix_s);
  int scans() const { return scans_; }  // that refresh() has finished
  // Why the keys could not be read again, "" if they could; those that were
  // read before count until then.
  const std::string& problem() const { return problem_; }

  // Why a message that came with `key` is refused; nothing if it is not.
  std::optional<pb::Refusal> judge(const std::string& key,
                                   const pb::Envelope& message,
                                   const core::Coordinator& core) const;
  // The same, by the role of the key alone; "" if it may say this.
  std::string why_refused(const std::string& key,
                          const pb::Envelope& message) const;
  // The right of `key` to a worker name that `owner` registered.
  core::Claim claim(const std::string& key, const std::string& owner) const;
  // Logs a refusal. The event of a refused worker, at most one a second.
  std::optional<pb::EventRecord> refusal_event(const pb::Envelope& message,
                                               const pb::Refusal& why,
                                               double unix_s);

 private:
  struct Member {
    rundir::AllowedKey key;
    std::string joined_by;  // join key, of a member admitted by a ticket
    // Since seen_s was set; of those that joined.
    mutable bool seen = true;
    double seen_s = 0;
  };
  explicit Door(Options options) : options_(std::move(options)) {}
  struct Files {
    std::string stamp;  // changes when they do
    Result<std::vector<rundir::AllowedKey>> listed = unavailable("not read");
    std::string next_key;  // public, of the coordinator; "": none
  };
  static Files look(const std::string& run, const std::string& stamp);
  Status take(const Files& files);
  bool forget_joined(double unix_s);
  bool good(const Member& member, double unix_s) const;
  const Member* find(const std::string& key) const;
  std::vector<std::string> publish(double unix_s);
  Status enrol(const std::string& key, const wire::Ticket& ticket,
               double unix_s);

  Options options_;
  bool made_ = false;
  wire::KeyPair own_;
  wire::Server* server_ = nullptr;
  std::shared_ptr<Background<Files>> look_;  // that is under way
  int scans_ = 0;
  std::string stamp_;
  // By job secret. A worker sends one when its connection breaks.
  core::RateLimit tickets_{50, 5000};
  std::string problem_;
  std::map<std::string, Member> members_;  // by public key
  std::set<std::string> good_;             // those that are allowed now
  double looked_s_ = 0;
  double refreshed_s_ = 0;
  double next_expiry_s_ = 0;
  double last_expiry_s_ = 0;  // of those that have expired
  double told_s_ = 0;
};

// What the sender of a refused message is told.
pb::Envelope answer_to_refused(const pb::Envelope& message,
                               const pb::Refusal& why);

}  // namespace remesh::server
