// A Backend that passes every call on to another and adds up, for each kind of
// operation, the time it takes, the arithmetic of its products and the memory
// it has to move at least (each operand once): the breakdown of bench_step.
//
// One thread. The wrapped backend must outlive it; weights made through it are
// the wrapped backend's own.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "worker/kernels/backend.h"

namespace remesh::bench {

struct OperationCost {
  double seconds = 0;
  double flops = 0;  // of matrix products
  double bytes = 0;
};

class ProfilingBackend : public kernels::Backend {
 public:
  // By kind of operation.
  virtual const std::map<std::string, OperationCost>& costs() const = 0;
  virtual void reset() = 0;
};

std::unique_ptr<ProfilingBackend> make_profiling_backend(
    kernels::Backend& inner);

}  // namespace remesh::bench
