// What this process may use of its machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace remesh {

// The affinity of the calling thread, which threads created later inherit, in
// ascending order; empty: unknown.
std::vector<int> allowed_cpus();
// Number of processors that affinity and cgroup quota allow this process.
int usable_cores();
// Whether the processor has bf16 instructions.
bool processor_has_bf16();
// The lowest CPU limit of a process's cgroups and their parents, in processors,
// of either version, mounted at `root`; 0: none. `own`: its /proc/PID/cgroup.
double cgroup_cpu_limit(const std::string& own, const std::string& root);
// Memory of the host in bytes, or the cgroup limit if that is lower; 0:
// unknown.
uint64_t usable_memory();
// The lowest memory limit of a process's cgroups and their parents, of either
// version, mounted at `root`; 0: none. `own`: its /proc/PID/cgroup.
uint64_t cgroup_memory_limit(const std::string& own, const std::string& root);
// How many processes the kernel has killed for lack of memory: of this
// process's cgroup, or of the host if no cgroup counts them. It only grows.
uint64_t oom_kills();
// The same with the files at other places.
uint64_t oom_kills(const std::string& own, const std::string& root,
                   const std::string& vmstat);

}  // namespace remesh
