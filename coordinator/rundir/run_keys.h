// RUN/keys: who may talk to the coordinator of a run. The folder is only for
// the owner of the run. coordinator.key and the keys of members (NAME.key) are
// secret; coordinator.pub is the coordinator's public key; allowed.toml lists
// the members, and the coordinator reads it again whenever it changes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/rundir/paths.h"
#include "proto/wire/keys.h"

namespace remesh::rundir {

struct AllowedKey {
  std::string public_key;
  std::string role;           // worker, operator, viewer or join
  std::string name;           // unique
  std::string workers = "*";  // pattern of the worker names it may use
  int64_t expires = 0;        // unix seconds; 0: never
  std::string replaces;       // the public key whose worker names it takes over

  bool good_at(double unix_s) const {
    return expires == 0 || unix_s < static_cast<double>(expires);
  }
};

// The error names the line or the key, and what is allowed.
Result<std::vector<AllowedKey>> parse_allowed(const std::string& text);
std::string allowed_text(const std::vector<AllowedKey>& keys);
Result<std::vector<AllowedKey>> read_allowed(const std::string& run);
Status write_allowed(FileSystem& fs, const std::string& run,
                     const std::vector<AllowedKey>& keys);

// Fails if that cannot be known now.
Result<bool> has_keys(FileSystem& fs, const std::string& run);
// The coordinator's key, and those of a worker and an operator, which programs
// that see the run directory use unless they are given another one.
Status make_keys(FileSystem& fs, const std::string& run);
// Makes a key that replaces or joins the list, and its file; returns its path.
// `out`: "" for RUN/keys/NAME.key. The key that it replaces is good until
// `old_until` (unix seconds).
Result<std::string> make_member(FileSystem& fs, const std::string& run,
                                AllowedKey key, std::string out,
                                int64_t old_until = 0);
// Makes the key that the coordinator will use after its next start.
Status make_next_key(const std::string& run);
// Uses the key that make_next_key() made, if there is one.
Status promote_next_key(FileSystem& fs, const std::string& run);

}  // namespace remesh::rundir
