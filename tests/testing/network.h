// A network of several simulated hosts: Linux network namespaces (ip-netns(8))
// connected by a bridge in the first of them, so that the machine's own network
// is not touched. Needs root.
//
// Ownership: the destructor removes the namespaces and kills their processes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::testing {

class Network {
 public:
  // Unavailable, with the output of ip, if it is not permitted.
  static Result<std::unique_ptr<Network>> make(int hosts);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Arguments that run the program after them on that host.
  std::vector<std::string> on(int host) const;
  // Its address, "10.77.0.(host + 1)".
  static std::string address(int host);
  // Disconnects a host, or connects it again.
  void set_link(int host, bool up);

 private:
  Network() = default;
  Status add_host(int host);
  std::vector<std::string> names_;
};

}  // namespace remesh::testing
