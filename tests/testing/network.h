// A network of several hosts on this one: Linux network namespaces
// (ip-netns(8)) whose interfaces meet on a bridge in the first of them, so that
// nothing of the host's own network is touched. Needs root.
//
// The namespaces, and what runs in them, are the network's: they go with it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::testing {

class Network {
 public:
  // Unavailable, with ip's words, where it is not permitted.
  static Result<std::unique_ptr<Network>> make(int hosts);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Words to put before a program so that it runs on that host.
  std::vector<std::string> on(int host) const;
  // Its address, "10.77.0.(host + 1)".
  static std::string address(int host);
  // Cuts a host off, or connects it again.
  void set_link(int host, bool up);

 private:
  Network() = default;
  Status add_host(int host);
  std::vector<std::string> names_;
};

}  // namespace remesh::testing
