// Exchange: carries out a plan (exchange_plan.h) between the processes of a new
// generation, by local copies and by messages with a checksum each. The result
// is bit-identical to the sources.
//
// Extra memory: options.staging_bytes, whatever the size of the model.
#pragma once

#include <functional>
#include <span>

#include "checkpoint/exchange/exchange_plan.h"
#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"

namespace remesh::exchange {

struct ExchangeOptions {
  int64_t staging_bytes = int64_t{16} << 20;
  int tag = 0;
  // Called on progress, in the calling thread; may be empty.
  std::function<void()> tick;
};

// Fills `target`, the vectors of this process's new rank (unused if it has none
// or reuses a state). `sources` are the states by the plan's index; only those
// of this host that the plan reads need to be set. `ready` is the result of
// this process's preparation: if any process failed, none begins.
//
// Collective over all processes of the plan. If it fails on one process, it
// fails on all: there with the reason, elsewhere with Cancelled. Corrupt: a
// message's checksum is wrong; InvalidArgument, on all: the plans differ.
// `target` is unspecified then; the sources are unchanged.
Status run_exchange(comm::Comm& comm, const Plan& plan,
                    std::span<const geometry::ConstStateView> sources,
                    const geometry::StateView& target, const Status& ready,
                    const ExchangeOptions& options);

}  // namespace remesh::exchange
