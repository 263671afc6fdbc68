// Journal: what the coordinator must not forget, RUN/journal.db (SQLite).
//
// One row holds the newest pb::Durable, with a checksum over it; a second
// table is the history of such changes for people (the newest kMaxHistory).
// persist() is one transaction, and durable when it returns: kill -9, a crash
// of the host or a full disk leave the state of the last persist() that said
// ok, or of the one under way, never a mixture.
//
// A rollback journal (journal_mode TRUNCATE, synchronous FULL) and not a
// write-ahead log: the log of the latter silently ends at a damaged frame, so
// that an older state would be taken for the newest, while here the newest
// state stands in the main file under its own checksum, and damage is noticed.
// It also needs no shared memory, so it works on network file systems that
// have locks. It costs a few syncs a transaction; there are a handful of
// transactions a generation and none a step.
//
// Ownership: owns the connection. Threads: one. The run directory's lock
// (rundir::RunLock) keeps a second coordinator away; SQLite's own lock is held
// too, so that no other program writes in between.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::server {

// One row of the history.
struct JournalEntry {
  int64_t id = 0;
  double time = 0;
  int64_t generation = 0;
  std::string phase;
  std::string detail;
};

class Journal {
 public:
  static constexpr int64_t kMaxHistory = 10'000;

  // Opens or makes the file. Corrupt, saying what to do, when it is not a
  // sound journal; it is then left as it is. `max_history`: rows kept.
  static Result<std::unique_ptr<Journal>> open(
      const std::string& path, int64_t max_history = kMaxHistory);
  virtual ~Journal() = default;

  // The newest state, none in a new journal.
  virtual const std::optional<pb::Durable>& restored() const = 0;
  virtual Status persist(const pb::Durable& durable, double unix_s) = 0;
  // The newest `limit` entries, oldest first.
  virtual Result<std::vector<JournalEntry>> history(int64_t limit) const = 0;
};

}  // namespace remesh::server
