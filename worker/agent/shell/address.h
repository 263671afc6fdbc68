// CoordinatorAddress: the value of `--connect`, which is the address of the
// coordinator or its run directory. In a run directory, the first line of
// coordinator.addr is the address; each coordinator process rewrites it, also
// one on another host.
#pragma once

#include <string>

#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/limits/plausible.h"

namespace remesh::agent {

class CoordinatorAddress {
 public:
  // InvalidArgument when `connect` is neither tcp://HOST:PORT nor a folder; one
  // with a '/' in its name may be created later.
  static Result<CoordinatorAddress> parse(const std::string& connect);

  // The address given, or else the current one of the run directory; NotFound
  // while that has none.
  Result<std::string> read() const;
  // Whether an address was given.
  bool fixed() const { return !address_.empty(); }
  // The run directory; "" while it is unknown.
  const std::string& run() const { return run_; }
  // Sets the run that the worker belongs to, when an address was given.
  void set_run(const std::string& run_dir) {
    if (run_.empty()) run_ = run_dir;
  }

 private:
  std::string address_;
  std::string run_;
};

// What a run directory says of its coordinator. Reading it may take long.
struct RunLookup {
  Result<std::string> address = unavailable("not read yet");
  // How the run ended, by its last event; UNKNOWN if it has not.
  pb::JobStatus::State outcome = pb::JobStatus::UNKNOWN;
};
RunLookup look_up(const std::string& run_dir);

using limits::valid_name;

}  // namespace remesh::agent
