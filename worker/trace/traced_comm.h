// TracedComm: decorates a Comm and records its operations in a Tracer. A
// blocking operation is a span with its bytes and the name of the group. A
// nonblocking one is a span on a communication lane, and each wait for it a
// span on the compute lane. On the pipeline's group ("pp") waiting is the
// bubble. The flight record also has the members of each group, the peers of
// messages and the sequence number of a collective in its group, so that one
// can find out which ranks wait for which.
//
// Without an output the tracer costs nothing. Groups split from a TracedComm
// are traced, too. With a flight record, a split performs a small all-gather,
// so either all ranks or none must have one.
//
// Ownership: borrows or owns the inner comm; borrows the tracer, which must
// outlive this comm and everything split from it. Threads: as the inner comm.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "worker/trace/observed_comm.h"
#include "worker/trace/tracer.h"

namespace remesh::trace {

// The names of the groups that comm::Mesh::make() splits off, in that order.
std::vector<std::string> mesh_group_names();

// The observer of a TracedComm.
class TraceObserver {
 public:
  // A nonblocking operation in progress.
  class Started {
   public:
    Started(Tracer& tracer, const board::Op& op, const board::Op& wait,
            const char* group)
        : tracer_(&tracer),
          op_(op),
          wait_(wait),
          group_(group),
          ticket_(tracer.begin(op)) {}
    Span waiting() const {
      return {tracer_, wait_, {{"bytes", wait_.bytes}}, group_};
    }
    void done();

   private:
    Tracer* tracer_;
    board::Op op_, wait_;
    const char* group_;
    Ticket ticket_;
  };

  // `ranks` has the world rank of each rank of the group.
  TraceObserver(Tracer& tracer, const std::string& group,
                std::vector<int> ranks);
  bool listens() const { return tracer_->listens(); }
  Span blocking(const CommOp& op);
  Started started(const CommOp& op);

  Tracer& tracer() const { return *tracer_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  board::Op to_op(const CommOp& op);

  Tracer* tracer_;
  const char* group_;  // from Tracer::keep()
  bool pipeline_;
  std::vector<int> ranks_;
  int id_ = -1;              // of the group in the flight record
  int64_t collectives_ = 0;  // started on this group
};

class TracedComm final : public ObservedComm<TraceObserver> {
 public:
  // The next splits create groups with the names `split_names`; later ones keep
  // the name of this group.
  TracedComm(comm::Comm& world, Tracer& tracer, const std::string& group,
             const std::vector<std::string>& split_names = {});

  std::unique_ptr<comm::Comm> split(int color, int key) override;

 private:
  TracedComm(std::unique_ptr<comm::Comm> inner, Tracer& tracer,
             const std::string& group, std::vector<int> ranks);

  const std::string group_;
  std::deque<std::string> split_names_;
};

}  // namespace remesh::trace
