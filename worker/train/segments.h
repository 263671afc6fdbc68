// Segments: the state segments in a worker's folder of shared memory, as one of
// its ranks sees them. Several ranks take theirs at the same time: who has a
// segment open to write (a lock that ends with the process) has it.
//
// Stateless but for its names. Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "checkpoint/memory/segment.h"

namespace remesh::train {

class Segments {
 public:
  Segments(std::string folder, uint64_t job)
      : folder_(std::move(folder)), job_(job) {}

  // That one, to write or to read. NotFound, Corrupt; Unavailable when another
  // process has it.
  Result<std::unique_ptr<memory::StateSegment>> open(
      const std::string& path, memory::StateSegment::Mode mode) const;
  // One for vectors of `elements`: an old one of a size that suits, which
  // nobody has and which is not in `avoid`, with whatever it holds; else a new
  // one. When shared memory is short, what nobody has and is in neither set is
  // removed first. Exhausted when it is still short: what is needed and there,
  // and what helps.
  Result<std::unique_ptr<memory::StateSegment>> take(
      int64_t elements, const std::set<std::string>& avoid,
      const std::set<std::string>& keep) const;
  // Removes what nobody has open to write and is not in `keep`, damaged ones
  // too. How many.
  int sweep(const std::set<std::string>& keep) const;
  // Those left by processes that died while they made them. REQUIRES: nobody
  // is making one.
  void remove_unfinished() const;

 private:
  std::unique_ptr<memory::StateSegment> reuse(
      int64_t elements, const std::set<std::string>& avoid) const;
  Result<std::unique_ptr<memory::StateSegment>> create(int64_t elements) const;

  std::string folder_;
  uint64_t job_;
};

}  // namespace remesh::train
