// Asking a coordinator: one question, one answer, with a time limit.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::ctl {

// A run as the user named it: a run directory, an address, or nothing (the
// newest run below ./runs).
struct Target {
  std::string run_dir;  // "" when only an address was given
  std::string address;  // "" when the run has no coordinator
};
Result<Target> find_target(const std::string& named);

// Sends the command, again every kResendMs, until the answer is there.
// Unavailable, naming the address, when the time is over.
Result<pb::Reply> ask(const std::string& address, const pb::Command& command,
                      int timeout_ms);

// The same without waiting, for who follows a run: at most one question under
// way. Threads: one.
class Asker {
 public:
  static Result<std::unique_ptr<Asker>> connect(const std::string& address);
  void send(pb::Command command);   // forgets the one under way
  std::optional<pb::Reply> poll();  // its answer, once
  bool waiting() const { return waiting_; }

 private:
  std::unique_ptr<wire::Client> client_;
  uint64_t id_ = 0;
  bool waiting_ = false;
};

}  // namespace remesh::ctl
