// Measures this host with the kernels and messages that ranks use, in a few
// seconds. All ranks of the world measure at once, one thread each, so that
// they share caches and memory as in training.
#pragma once

#include "parallel/comm/comm.h"
#include "worker/kernels/backend.h"
#include "worker/measure/measured.h"

namespace remesh::measure {

// Collective. The result is the same on all ranks. `network_bytes_per_s` is
// left at 0. Fails if memory is short. REQUIRES: two ranks or more.
Result<Measured> measure_host(comm::Comm& world, kernels::Backend& backend);

// In a second or two, by so many threads of this process at once; what a rank
// exchanges with others is as in Measured's defaults.
Result<Measured> measure_cores(int num_threads);

// Bytes per second of the fastest network interface that is up; 0: none says.
double network_speed();
// "AMD EPYC 9R14", of /proc/cpuinfo.
std::string processor_name();

}  // namespace remesh::measure
