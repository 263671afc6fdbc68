// Pinning: assigns CPUs to ranks. Ranks that load all CPUs of a host evenly are
// pinned, so that the kernel does not run two of them on one CPU while another
// idles: all ranks of a step wait for the slowest.
#pragma once

#include <span>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::train {

// The CPUs of rank `rank`. The ranks of a host get as many CPUs as they have
// threads, in rank order. If there are k times as many single-threaded ranks as
// CPUs, k consecutive ranks share a CPU. Those are data-parallel ranks of one
// pipeline stage, which do the same work at the same time, so each behaves like
// a rank on a CPU with 1/k of the speed.
//
// Returns an empty vector if the rank must not be pinned: the ranks leave CPUs
// of the host free, or would load them unevenly, or their threads are unknown.
// `allowed` has the CPUs that the process may use, in ascending order, the same
// for all ranks of the host.
std::vector<int> cpus_of_rank(const pb::Assignment& assignment, int rank,
                              std::span<const int> allowed);

// Binds the calling thread, and threads created later, to CPUs.
// REQUIRES: `cpus` is not empty.
Status pin_to(std::span<const int> cpus);

}  // namespace remesh::train
