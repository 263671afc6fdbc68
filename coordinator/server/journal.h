// Journal: the coordinator's durable state, RUN/journal.db (SQLite).
//
// One row holds the newest pb::Durable and a checksum of it. persist() is one
// transaction, and durable when it returns: kill -9, a crash of the host or a
// full disk leave the state of the last persist() that returned ok, or of the
// one in progress, never a mixture.
//
// It uses a rollback journal (journal_mode TRUNCATE, synchronous FULL) rather
// than a write-ahead log. A WAL silently ends at a damaged frame, so that an
// older state would be taken for the newest; here the newest state is in the
// main file under its own checksum, and damage is noticed. A rollback journal
// also needs no shared memory, so it works on network file systems that have
// locks. It costs a few syncs per transaction; there are a handful of
// transactions per generation and none per step.
//
// Ownership: owns the connection. Threads: one. The run directory's lock
// (rundir::RunLock) keeps a second coordinator out. Where that is lost, the one
// with the larger epoch wins: the other one's next persist() fails.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::server {

class Journal {
 public:
  // Opens the file, or creates it: under another name that is renamed when the
  // journal in it is complete, so that an empty or cut file is damage and never
  // a new run. Corrupt, saying what to do, when the file is not a sound
  // journal; it is then left as it is. `fs` serves for the calls around SQLite,
  // which opens the file itself.
  static Result<std::unique_ptr<Journal>> open(FileSystem& fs,
                                               const std::string& path);
  virtual ~Journal() = default;

  // The newest state; none in a new journal.
  virtual const std::optional<pb::Durable>& restored() const = 0;
  // Cancelled, without a change, if another coordinator has written since, and
  // its epoch is not smaller.
  virtual Status persist(const pb::Durable& durable) = 0;
};

}  // namespace remesh::server
