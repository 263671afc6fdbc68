// MappedReplica: a replica of a state that lies in shared memory of the same
// host, though of another worker: the keeper maps the owner's segment and
// copies it piece by piece, with nobody's help and through no message. It does
// half the work that sending and receiving would: each piece is read once, and
// hashed on its way. The replica is committed when it is complete and what it
// was copied from still stands.
//
// When: as the Replicator (replica.h), with which it is used side by side. The
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
  // `rank`: whose state it is. `owner`: mapped to read. `copy`: open to write,
  // with room for `elements`.
  MappedReplica(int rank, std::unique_ptr<memory::StateSegment> owner,
                memory::StateSegment& copy, int64_t elements,
                int64_t piece_bytes);

  // The owner has committed, or is about to, what it says of step `step` in
  // that generation. REQUIRES: done().
  void start(int64_t step, int64_t generation);
  // Copies a piece, once the owner has committed; true when nothing is under
  // way.
  bool poll();
  bool done() const { return !under_way_; }
  // Pieces copied so far, to see that it moves.
  uint64_t pieces() const { return pieces_; }
  // Corrupt when the last one did not come whole; the one before it stays.
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
  bool under_way_ = false;
  bool found_ = false;
  int buffer_ = 0;
  int64_t at_ = 0;  // over the three vectors
  uint64_t pieces_ = 0;
  memory::ContentHash hash_{};
  Xxh3Stream stream_;  // of the vector that is being copied
  Status status_;
};

}  // namespace remesh::exchange
