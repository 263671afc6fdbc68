// A Backend that passes every call on to another and adds up the time each
// kind of operation takes: the breakdown of bench_step.
//
// One thread. The wrapped backend must outlive it; weights made through it are
// the wrapped backend's own.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "worker/kernels/backend.h"

namespace remesh::bench {

class ProfilingBackend : public kernels::Backend {
 public:
  // Seconds by kind of operation.
  virtual const std::map<std::string, double>& seconds() const = 0;
  virtual void reset() = 0;
};

std::unique_ptr<ProfilingBackend> make_profiling_backend(
    kernels::Backend& inner);

}  // namespace remesh::bench
