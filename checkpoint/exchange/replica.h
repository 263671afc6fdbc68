// Replicator: one rank's part in copying committed states to the ranks that
// keep them (memory::place_replicas), piece by piece beside the computing:
// straight from one shared-memory segment into another, no memory in between.
//
// A replica segment has two buffers like any other: what arrives goes into the
// older one and is committed when it is complete and its checksum is right. A
// replica that came half, or damaged, never takes the place of a whole one.
//
// Life of a step, with the state of step k committed in the rank's segment:
//   start(k)    at the same boundary on all ranks
//   poll()      as often as there is time: between passes, in waits
//   finish()    BEFORE the rank joins the agreement of step k + 1, whose update
//               overwrites step k - 1: else a host lost at that moment would
//               leave the survivors with k, and its replica with k - 1
// Step k is safe, and may be told as finished, once finish() is done on all
// ranks.
//
// Messages of one pair and tag: one of the record (StateInfo), then the pieces
// of the three vectors, then the content hash. Their number and sizes follow
// from the elements, which both sides know beforehand, so a damaged record
// breaks no order.
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
  int64_t piece_bytes = int64_t{1} << 18;  // of one poll's work; cached
  int window = 3;                          // pieces under way, a pair
  int tag = 0;                             // of this comm
};

// A replica that this rank keeps for another.
struct KeptReplica {
  int rank = 0;  // of the comm: whose it is
  int64_t elements = 0;
  memory::StateSegment* segment = nullptr;  // open to write, large enough
};

class Replicator {
 public:
  // `holders`: ranks of the comm that keep this rank's state.
  Replicator(comm::Comm& comm, const memory::StateSegment& own,
             std::span<const int> holders, std::vector<KeptReplica> kept,
             const ReplicaOptions& options);
  // Waits like finish(), so that no request outlives it.
  ~Replicator();
  Replicator(const Replicator&) = delete;
  Replicator& operator=(const Replicator&) = delete;

  // Begins to send this state and to receive those of the same step.
  // REQUIRES: done(); c stands in the own segment, and its buffer is not begun
  // before done(); every rank of the placement calls it alike.
  void start(const memory::StateSegment::Committed& c);
  // A little work; true when nothing is under way.
  bool poll();
  bool done() const;
  // Of the last one that ended: as finish().
  Status status() const;
  // Messages begun so far, to see that it moves.
  uint64_t messages() const;
  // Polls until all is done, running `tick` (may be empty). Corrupt, naming the
  // rank, when a replica that this one keeps did not arrive whole this time;
  // its last whole one stays.
  Status finish(const std::function<void()>& tick = {});

 private:
  class Stream;
  class Sender;
  class Receiver;
  std::vector<std::unique_ptr<Sender>> senders_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
};

// The same between two segments of one process: a rank that keeps its own
// state of some step, where states are replicated less often than every step.
class LocalReplica {
 public:
  LocalReplica(const memory::StateSegment& own, memory::StateSegment& copy,
               int64_t piece_bytes)
      : own_(own), copy_(copy), piece_(piece_bytes / 4) {}
  // REQUIRES: poll() gave true; c stands until it does again.
  void start(const memory::StateSegment::Committed& c);
  // Copies a piece; true when nothing is left to do.
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
