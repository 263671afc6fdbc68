// TracedComm: a Comm that tells a Tracer what is done on another one. Each
// operation becomes a span with its bytes and the name of the group; waiting
// for one that was started before becomes a span of its own on the compute
// lane, the time from start to end another on a communication lane. On the
// pipeline's group ("pp") waiting is the bubble. The flight record learns the
// members of each group, too, the peers of messages, and which of the group's
// collectives it is: so that ranks which wait for each other can be told apart.
//
// While nobody listens to the tracer it only passes on. Groups split from it
// are traced, too; with a flight record a split is followed by a small
// all-gather, so either all ranks have one or none. Ownership: borrows or owns
// the other comm; borrows the tracer, which must outlive it and everything
// split from it. Threads: as the comm's.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "worker/trace/observed_comm.h"
#include "worker/trace/tracer.h"

namespace remesh::trace {

// The names of the groups that comm::Mesh::make() splits off, in its order.
std::vector<std::string> mesh_group_names();

// Tells a tracer; for ObservedComm.
class TraceObserver {
 public:
  // A span of the compute lane, while it lives.
  class Scope {
   public:
    Scope(Tracer& tracer, const board::Op& op, const char* group, Arg second)
        : tracer_(tracer),
          op_(op),
          group_(group),
          second_(second),
          ticket_(tracer.begin(op)) {}
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Tracer& tracer_;
    const board::Op op_;
    const char* const group_;
    const Arg second_;
    const Ticket ticket_;
  };
  // An operation under way beside the training thread.
  class Started {
   public:
    Started(Tracer& tracer, const board::Op& op, const board::Op& wait,
            const char* group)
        : tracer_(&tracer),
          op_(op),
          wait_(wait),
          group_(group),
          ticket_(tracer.begin(op)) {}
    Scope waiting() const { return {*tracer_, wait_, group_, {}}; }
    void done();

   private:
    Tracer* tracer_;
    board::Op op_, wait_;
    const char* group_;
    Ticket ticket_;
  };

  // ranks: of the world, by rank of the group.
  TraceObserver(Tracer& tracer, const std::string& group,
                std::vector<int> ranks);
  bool listens() const { return tracer_->listens(); }
  Scope blocking(const CommOp& op);
  Started started(const CommOp& op);

  Tracer& tracer() const { return *tracer_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  board::Op to_op(const CommOp& op);

  Tracer* tracer_;
  const char* group_;  // kept by the tracer
  bool pipeline_;
  std::vector<int> ranks_;
  int id_ = -1;              // of the flight record
  int64_t collectives_ = 0;  // begun on this group
};

class TracedComm final : public ObservedComm<TraceObserver> {
 public:
  // split_names: of the groups that the next splits make; those after them
  // keep this group's name.
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
