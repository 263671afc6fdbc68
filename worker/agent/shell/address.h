// CoordinatorAddress: the value of `--connect`, which is the address of the
// coordinator or its run directory. In a run directory, the first line of
// coordinator.addr is the address; each coordinator process rewrites it.
#pragma once

#include <string>

#include "proto/base/status.h"

namespace remesh::agent {

class CoordinatorAddress {
 public:
  // InvalidArgument when `connect` is neither tcp://HOST:PORT nor a folder.
  static Result<CoordinatorAddress> parse(const std::string& connect);

  // The current address; NotFound while the run directory has none.
  Result<std::string> read() const;
  // How the run in the run directory ended ("done", "failed", "stopped"), by
  // its last event; "" if it has not, or if only an address was given.
  std::string outcome() const;
  bool may_change() const { return !file_.empty(); }

 private:
  std::string address_;
  std::string file_;
  std::string run_;
};

// Whether `name` is 1-64 of [A-Za-z0-9._-], starting with a letter or digit.
bool valid_name(const std::string& name);

}  // namespace remesh::agent
