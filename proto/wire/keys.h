// Keys of the control plane: Curve25519 pairs in Z85 (40 characters), the files
// that hold them, and the text that files and tickets are written in: sections
// of NAME = "VALUE" lines below a line [[key]], a subset of TOML.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::wire {

struct KeyPair {
  std::string public_key;
  std::string secret_key;
  friend bool operator==(const KeyPair&, const KeyPair&) = default;
};
// The public key never begins with '-': no command line takes it for an option.
KeyPair new_key_pair();
bool valid_key(const std::string& z85);
// The 32 bytes of a valid key.
std::array<uint8_t, 32> key_bytes(const std::string& z85);

using Section = std::map<std::string, std::string>;
// The error names the line.
Result<std::vector<Section>> parse_sections(const std::string& text);
// Characters that a value cannot have become '\''.
std::string section_text(const Section& section);

// The secret key of a member, with what else its program has to know.
struct KeyFile {
  std::string role;  // coordinator, worker, operator, viewer or join
  std::string name;  // of the key
  KeyPair pair;
  std::string server;  // public key of the coordinator; "": not known
};
// Whoever can replace the files of a folder of keys decides who is trusted.
// Fails unless it is a folder, no link, that only this user or root may change.
Status check_keys_folder(const std::string& folder);
// Fails if the file is not a key, or if others may read or change it: it must
// belong to this user (mode 0600) or, like a secret that a service manager
// passes on, to root (at most readable by the group).
Result<KeyFile> read_key_file(const std::string& path);
// Creates the file with mode 0600; AlreadyExists if there is one.
Status create_key_file(const std::string& path, const KeyFile& key);
// The public key in a file of any mode: the key alone, or the line
// public = "KEY" of a key file.
Result<std::string> read_public_key(const std::string& path);
// The same, or `text` itself if there is no such file: a path may look like a
// key.
Result<std::string> public_key_of(const std::string& text);

// What the holder of a job's join key says to have the key of a worker
// admitted. It travels over a connection that the join key encrypts and
// authenticates, so that only its holder can make one, and nobody can read or
// repeat it.
struct Ticket {
  std::string public_key;  // of the worker: only its holder has any use of it
  std::string worker;      // its name
  std::string job;         // "": whatever job the coordinator runs
  int64_t expires = 0;     // unix seconds; kTicketGoodForS after it was made
};
inline constexpr int64_t kTicketGoodForS = 600;
std::string ticket_text(const Ticket& ticket);
Result<Ticket> parse_ticket(const std::string& text);

}  // namespace remesh::wire
