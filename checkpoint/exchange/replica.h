// Replicator: one rank's part in copying committed states to the ranks that
// keep replicas of them (memory::place_replicas), piece by piece, overlapped
// with compute: directly from one shared-memory segment into another.
//
// A replica segment has two buffers like any other: the data received goes into
// the older one and is committed when it is complete and its checksum is right.
// A partial or damaged replica never replaces a complete one.
//
// Each step, with the state of step k committed in the rank's segment:
//   start(k)    at the same boundary on all ranks
//   poll()      as often as possible: between passes, in waits
//   finish()    BEFORE the rank joins the agreement of step k + 1, whose update
//               overwrites step k - 1: otherwise the loss of a host at that
//               moment would leave the survivors with k, and its replica with
//               k - 1
// Step k is safe, and may be reported as finished, once finish() has returned
// on all ranks.
//
// Messages of one pair and tag: the record (StateInfo), the pieces of the three
// vectors, the content hash. Their number and sizes follow from the elements,
// which both sides know beforehand, so a damaged record does not break the
// order.
//
// Ownership: borrows comm and segments. Threads: one at a time, the one that
// may use the comm. Not copyable; its requests refer to it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"

namespace remesh::exchange {

struct ReplicaOptions {
  int64_t piece_bytes = int64_t{1} << 18;  // per poll; fits into a cache
  int window = 3;                          // pieces in flight per pair
  int tag = 0;                             // of this comm
};

// A replica that this rank keeps for another.
struct KeptReplica {
  int rank = 0;  // the owner, a rank of the comm
  int64_t elements = 0;
  memory::StateSegment* segment = nullptr;  // open for writing
};

class Replicator {
 public:
  // `holders`: ranks of the comm that keep this rank's state.
  Replicator(comm::Comm& comm, const memory::StateSegment& own,
             std::span<const int> holders, const std::vector<KeptReplica>& kept,
             const ReplicaOptions& options);
  // Waits like finish(): no request outlives it.
  ~Replicator();
  Replicator(const Replicator&) = delete;
  Replicator& operator=(const Replicator&) = delete;

  // Starts to send this state and to receive those of the same step.
  // REQUIRES: done(); c is valid in the own segment, and its buffer is not
  // begun before done(); every rank of the placement calls it.
  void start(const memory::StateSegment::Committed& c);
  // Makes progress; true when nothing is in flight.
  bool poll();
  bool done() const;
  // The status of the last replica, as finish() returns it.
  Status status() const;
  // Messages started so far, to monitor progress.
  uint64_t messages() const;
  // Polls until done, calling `tick` (may be empty). Corrupt, naming the rank,
  // when a replica that this rank keeps arrived damaged; the last complete one
  // is kept.
  Status finish(const std::function<void()>& tick = {});

 private:
  class Stream;
  class Sender;
  class Receiver;
  std::vector<std::unique_ptr<Sender>> senders_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
};

// The same between two segments of one process: a rank keeps a copy of its own
// state if states are replicated less often than every step.
class LocalReplica {
 public:
  LocalReplica(const memory::StateSegment& own, memory::StateSegment& copy,
               int64_t piece_bytes)
      : own_(own), copy_(copy), piece_(piece_bytes / 4) {}
  // REQUIRES: poll() returned true; c stays valid until it does again.
  void start(const memory::StateSegment::Committed& c);
  // Copies a piece; true when done.
  bool poll();

 private:
  const memory::StateSegment& own_;
  memory::StateSegment& copy_;
  const int64_t piece_;
  memory::StateSegment::Committed from_;
  int buffer_ = 0;
  int64_t at_ = 0, end_ = 0;  // over the three vectors
};

}  // namespace remesh::exchange
