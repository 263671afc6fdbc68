// Where the coordinator is: `--connect` takes its address or its run
// directory, whose file coordinator.addr has the address in its first line and
// is written anew by each life of the coordinator.
#pragma once

#include <string>

#include "proto/base/status.h"

namespace remesh::agent {

class CoordinatorAddress {
 public:
  // InvalidArgument when `connect` is neither tcp://HOST:PORT nor a folder.
  static Result<CoordinatorAddress> parse(const std::string& connect);

  // The address now; NotFound while the run directory has none.
  Result<std::string> read() const;
  bool may_change() const { return !file_.empty(); }

 private:
  std::string address_;
  std::string file_;
};

// Of a worker, as --name allows: 1 to 64 letters, digits, '-', '_', '.', the
// first a letter or digit.
bool valid_name(const std::string& name);

}  // namespace remesh::agent
