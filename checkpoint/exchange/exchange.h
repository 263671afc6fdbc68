// Exchange: carries out a plan (plan.h) between the processes of a new
// generation: local copies, and messages from one to the other with a checksum
// each. What it gives has the bits of what it was given.
//
// Extra memory: options.staging_bytes, whatever the size of the model.
#pragma once

#include <functional>
#include <span>

#include "checkpoint/exchange/plan.h"
#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"

namespace remesh::exchange {

struct ExchangeOptions {
  int64_t staging_bytes = int64_t{16} << 20;
  int tag = 0;
  // Runs as it goes on, in the calling thread; may be empty.
  std::function<void()> tick;
};

struct ExchangeStats {
  int64_t local_bytes = 0, sent_bytes = 0, received_bytes = 0;
};

// Fills `target`, the vectors of this process's new rank (any when it has none,
// or adopts). `sources` are the states by the plan's index; those of this host
// that the plan reads must be there. `ready` is what this process has to say of
// its preparation: when one has failed, nobody begins.
//
// Collective over all processes of the plan. Fails on all of them when it fails
// on one: with its own words there, with the same code on the others. Corrupt:
// a message's checksum is wrong; InvalidArgument: they have different plans.
// Nothing can be said of `target` then; the sources are as they were.
Status run_exchange(comm::Comm& comm, const Plan& plan,
                    std::span<const geometry::ConstStateView> sources,
                    const geometry::StateView& target, const Status& ready,
                    const ExchangeOptions& options,
                    ExchangeStats* stats = nullptr);

// Collective: ok when `mine` is on every process; else `mine` when it is not
// ok, or "<what>: another process failed" with the worst code of all.
Status agree(comm::Comm& comm, const Status& mine, const char* what);

}  // namespace remesh::exchange
