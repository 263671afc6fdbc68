// A Backend that forwards every call to another one and adds up, while it
// records, per kind of operation, the time, the FLOPs of its GEMMs and the
// least memory traffic (each operand once): the breakdown of bench_step.
//
// One thread. The wrapped backend must outlive it; weights made through it
// belong to the wrapped backend.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "bench/step/yardstick.h"
#include "worker/kernels/backend.h"

namespace remesh::bench {

struct OperationCost {
  double seconds = 0;
  double flops = 0;  // of GEMMs
  double bytes = 0;
};

struct GemmUse {
  int64_t calls = 0;
  double seconds = 0;
};

class ProfilingBackend : public kernels::Backend {
 public:
  // By kind of operation.
  virtual const std::map<std::string, OperationCost>& costs() const = 0;
  // The GEMMs with weights, by shape.
  virtual const std::map<GemmShape, GemmUse>& gemms() const = 0;
  virtual void record(bool on) = 0;
};

std::unique_ptr<ProfilingBackend> make_profiling_backend(
    kernels::Backend& inner);

}  // namespace remesh::bench
