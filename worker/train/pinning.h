// Pinning: which CPUs a rank runs on. Ranks that fill a host to an even depth
// keep to CPUs of their own, so that the kernel's balancing does not put two on
// one CPU while another idles: ranks of one step wait for the slowest.
#pragma once

#include <span>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::train {

// The CPUs of rank `rank`: the ranks of its host take as many as they have
// threads, in rank order. Where ranks of one thread are k times the CPUs, k
// neighbours share one: they do the same at the same time (data-parallel ranks
// of one pipeline stage), so that each has a k-th of a CPU whenever it computes
// and shares and bubbles are those of slower CPUs. Empty: not to be pinned,
// since the host's ranks leave CPUs free, or would load them unevenly, or their
// threads are not known. `allowed`: CPUs that the process
// may use, ascending; the same for all ranks of the host.
std::vector<int> cpus_of_rank(const pb::Assignment& assignment, int rank,
                              std::span<const int> allowed);

// Of the calling thread; threads made later inherit it.
std::vector<int> allowed_cpus();
Status pin_to(std::span<const int> cpus);

}  // namespace remesh::train
