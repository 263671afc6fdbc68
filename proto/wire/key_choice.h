// Which keys a program uses to talk to a coordinator.
#pragma once

#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/wire/channel.h"

namespace remesh::wire {

struct KeyChoice {
  std::string run;     // run directory; "": only an address is known
  std::string member;  // whose key of RUN/keys is used if no file is named
  std::string key;     // file, from --key
  std::string server;  // public key or a file with it, from --server-key
  bool no_auth = false;
  // If the key is a job secret: what it has admitted.
  KeyPair own;
  std::string worker;
  std::string job;
};

// nullopt with no_auth. The server's public key is `server`, else that in the
// run directory, if only this user or root may change it, else the one in the
// key file. Errors say what to do.
Result<std::optional<ClientKeys>> choose_keys(const KeyChoice& choice);

}  // namespace remesh::wire
