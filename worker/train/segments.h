// Segments: allocates the state segments in a worker's folder of shared memory
// for one of its ranks. Several ranks allocate concurrently. A segment belongs
// to the process that has it open for writing; that lock ends with the process.
//
// Immutable. Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "checkpoint/memory/segment.h"

namespace remesh::train {

class Segments {
 public:
  // Calls `tick`, from any thread, while it allocates.
  Segments(std::string folder, uint64_t job, std::function<void()> tick = {})
      : folder_(std::move(folder)), job_(job), tick_(std::move(tick)) {}

  // Opens a segment for writing or reading. NotFound, Corrupt; Unavailable if
  // another process owns it.
  Result<std::unique_ptr<memory::StateSegment>> open(
      const std::string& path, memory::StateSegment::Mode mode) const;
  // Returns a segment for vectors of `elements`: an unowned one of suitable
  // size that is not in `avoid`, with its old contents, else a new one. If
  // shared memory does not suffice, first removes the unowned segments that are
  // in neither set. Exhausted if it still does not; the message has the sizes
  // and the remedies.
  Result<std::unique_ptr<memory::StateSegment>> take(
      int64_t elements, const std::set<std::string>& avoid,
      const std::set<std::string>& keep) const;
  // The same for a rank that restores its state from `source`, segments that
  // must be kept until then, where there is not room for all: the ranks of the
  // host take no more than each other, half of a segment, which is new (see
  // StateSegment::Extent), for which, if need be, unowned segments beside the
  // source are removed, and the buffers in the source are given back that are
  // not of that step and generation, except of `reused` segments.
  struct SourceStates {
    std::set<std::string> paths, reused;
    int64_t step = 0, generation = 0;
    // Of this worker and of others on this host that have states.
    std::set<std::string> folders(const std::string& own) const;
  };
  Result<std::unique_ptr<memory::StateSegment>> take_beside(
      int64_t elements, const SourceStates& source) const;
  // Removes the unowned segments, including damaged ones, that are not in
  // `keep`. Returns their number. beside: also in the folders of that source.
  int sweep(const std::set<std::string>& keep,
            const SourceStates* beside = nullptr) const;
  // Exhausted if there is less room than that.
  Status check_room(uint64_t bytes) const;
  // Removes segments whose creator died during creation. REQUIRES: no process
  // is creating one.
  void remove_unfinished() const;

 private:
  std::unique_ptr<memory::StateSegment> reuse(
      int64_t elements, const std::set<std::string>& avoid) const;
  Result<std::unique_ptr<memory::StateSegment>> create(
      int64_t elements, memory::StateSegment::Extent extent) const;
  void free_other_buffers(const SourceStates& source) const;

  std::string folder_;
  uint64_t job_;
  std::function<void()> tick_;
};

}  // namespace remesh::train
