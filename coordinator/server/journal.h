// Journal: the coordinator's durable state, RUN/journal.
//
// It has the newest pb::Durable. persist() is durable when it returns: kill -9,
// a crash of the host or a full disk leave the state of the last persist() that
// returned ok, or of the one in progress, never a mixture, and damage is
// noticed.
//
// The file has two slots, which persist() overwrites in turn, in place, so that
// it needs no free space until a state is larger than a slot. Then a file with
// larger slots replaces this one.
//
//   offset        bytes
//   0, 8192       mark of slot 0, twice: the state in it was complete on disk
//                 when the mark was written
//   4096, 12288   mark of slot 1, twice
//   16384         slot 0
//   16384 + size  slot 1
//
// A mark and a slot begin with the same header: magic, sequence number of the
// state, epoch, size of a slot, length of the state, checksum of all that. In a
// slot the state follows. A slot that does not verify was being written, unless
// a mark of its sequence number or a later one exists: then it is damaged.
//
// Ownership: owns the descriptor. Threads: one. The run directory's lock
// (rundir::RunLock) keeps a second coordinator out. Where that is lost, the one
// with the larger epoch wins: the other one's next persist() fails.
#pragma once

#include <cstdint>
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
  // journal; it is then left as it is. `fs` must outlive the journal.
  static Result<std::unique_ptr<Journal>> open(FileSystem& fs,
                                               const std::string& path);

  // The newest state; none in a new journal.
  const std::optional<pb::Durable>& restored() const { return restored_; }
  // Cancelled, without a change, if another coordinator has written since, and
  // its epoch is not smaller.
  Status persist(const pb::Durable& durable);
  // Writes the file again, with the newest state, if it was removed. Whether it
  // was.
  Result<bool> put_back();

 private:
  struct Header;
  Journal(FileSystem& fs, std::string path, bool writes)
      : fs_(fs), path_(std::move(path)), writes_(writes) {}
  friend Result<pb::Durable> read_journal(FileSystem&, const std::string&);
  Status put_file(uint64_t slot_bytes, const std::string& state);
  Status load();
  Status take_newest();
  Status take_others(uint64_t epoch);
  Status make_room(uint64_t bytes);
  Status replace(uint64_t slot_bytes);
  Status write(int slot, const std::string& state, uint64_t epoch);
  Status open_file();
  uint64_t slot_at(int slot) const;
  Result<Header> read_header(uint64_t offset) const;
  Result<std::string> read_state(int slot, const Header& header) const;
  Status damaged(const std::string& what) const;

  FileSystem& fs_;
  std::string path_;
  bool writes_;
  std::unique_ptr<File> file_;
  uint64_t slot_bytes_ = 0;
  // The newest state that is durable, and the epoch that wrote it.
  int slot_ = 0;
  uint64_t sequence_ = 0;
  uint64_t epoch_ = 0;
  // Checksum of the next state, which a failed persist() may have left in the
  // file.
  uint64_t tried_checksum_ = 0;
  bool renamed_ = false;  // and the folder was not synced since
  std::optional<pb::Durable> restored_;
};

// The newest state in the journal at `path`, without a lock; NotFound if there
// is none. For programs that are not the coordinator.
Result<pb::Durable> read_journal(FileSystem& fs, const std::string& path);

}  // namespace remesh::server
