// MappedReplica: a replica of a state in shared memory of the same host, owned
// by another worker: the keeper maps the owner's segment and copies it piece by
// piece, without messages or the owner's help. This is half the work of sending
// and receiving: each piece is read once and hashed on the way. The replica is
// committed when it is complete and its source is still valid.
//
// Called like the Replicator (replica.h), with which it is used together. The
// owner may begin the buffer of the state of step k again only when all ranks
// have finished their replicas of it.
//
// Ownership: owns the mapping of the owner's segment; borrows the replica's.
// Threads: one.
#pragma once

#include <cstdint>
#include <memory>

#include "checkpoint/memory/segment.h"
#include "proto/base/xxh3.h"

namespace remesh::exchange {

class MappedReplica {
 public:
  // `rank`: whose state it is. `owner`: open for reading. `copy`: open for
  // writing, with room for `elements`.
  MappedReplica(int rank, std::unique_ptr<memory::StateSegment> owner,
                memory::StateSegment& copy, int64_t elements,
                int64_t piece_bytes);

  // Starts a replica of the state that the owner has committed, or is about to
  // commit, for step `step` in that generation. REQUIRES: done().
  void start(int64_t step, int64_t generation);
  // Copies a piece, once the owner has committed; true when nothing is in
  // progress.
  bool poll();
  bool done() const { return !in_progress_; }
  // Pieces copied so far, to monitor progress.
  uint64_t pieces() const { return pieces_; }
  // Corrupt when the last replica is incomplete; the previous one is kept.
  const Status& status() const { return status_; }

 private:
  bool find();
  void finish();

  const int rank_;
  const std::unique_ptr<memory::StateSegment> owner_;
  memory::StateSegment& copy_;
  const int64_t elements_;
  const int64_t piece_;  // elements
  memory::StateSegment::Committed from_;
  int64_t step_ = 0, generation_ = 0;
  bool in_progress_ = false;
  bool found_ = false;
  int buffer_ = 0;
  int64_t at_ = 0;  // over the three vectors
  uint64_t pieces_ = 0;
  memory::ContentHash hash_{};
  Xxh3Stream stream_;  // of the vector being copied
  Status status_;
};

}  // namespace remesh::exchange
