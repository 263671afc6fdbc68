// StateSegment: a file in shared memory that holds the training state of one
// rank (fp32 master weights and both moments) in two buffers. A process that is
// killed between any two instructions leaves one complete, described state of
// some step. checkpoint/FORMAT.md specifies the bytes and the order of the
// elements; its section "The path of a state" says who writes what, and when.
//
//   header   magic, sizes, checksum: written once, never changed
//            two records per buffer: what the buffer holds (StateInfo), each
//            with a checksum and a sequence number
//   buffers  0 and 1, three vectors each
//
// The update reads one buffer and writes the other:
//   begin(b)    invalidates buffer b's records
//   ...         the owner writes buffer b
//   commit()    writes its record; the sequence number is stored last, by one
//               release store; 0 means that the record is invalid
// The largest sequence number is the newest commit. A buffer has two records so
// that a generation which reuses a state in place can describe it as its own
// (redescribe) before the previous generation's record becomes invalid.
//
// The file outlives its processes: a worker daemon that was killed finds it by
// its name (segment_directory.h) and reads what was committed. It is on tmpfs;
// its pages are touched once, when it is made, on huge pages where the kernel
// grants them, and it serves any state that fits (capacity).
//
// Ownership: an object maps the file and never removes it. One process at a
// time has it open for writing (flock, which ends with the process); any number
// read, also while it is written. Threads: one at a time per object.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/memory/state_info.h"
#include "parallel/geometry/state_vectors.h"
#include "proto/base/status.h"

namespace remesh::memory {

// Bytes of a segment whose vectors have up to `capacity` elements.
uint64_t segment_bytes(int64_t capacity);
// Bytes that it takes while only one of its buffers is allocated.
uint64_t half_segment_bytes(int64_t capacity);

ContentHash content_hash(const geometry::ConstStateView& state);

class StateSegment {
 public:
  struct Record;
  struct Header;

  // Creates a file at `path` (mode 0600), with nothing committed, for `job` (a
  // number that distinguishes the jobs of this host). AlreadyExists when the
  // path is taken; Exhausted, with the bytes needed and available, when shared
  // memory is short. Touches all pages: about half a second per GiB. The file
  // appears at `path` once it is complete; until then it is `path`.new. Calls
  // `tick`, if there is one, after each GiB.
  //
  // Extent::kHalf allocates buffer 0 alone, for a rank that restores its state
  // while the states it reads still take their room. REQUIRES: complete()
  // succeeds before begin(1).
  enum class Extent { kWhole, kHalf };
  static Result<std::unique_ptr<StateSegment>> create(
      const std::string& path, uint64_t job, int64_t capacity,
      Extent extent = Extent::kWhole, const std::function<void()>& tick = {});
  enum class Mode { kRead, kWrite };
  // Maps an existing one. Corrupt, with the reason, when the file is not a
  // complete segment of this version; InvalidArgument when it belongs to
  // another job or user; Unavailable when another process has it open for
  // writing (kWrite).
  static Result<std::unique_ptr<StateSegment>> open(
      const std::string& path, uint64_t job, Mode mode,
      const std::function<void()>& tick = {});
  // Gives the memory of one buffer of a segment back, and invalidates its
  // records. open(kWrite) allocates it again. Fails like open(kWrite).
  static Status free_buffer(const std::string& path, uint64_t job, int buffer);
  ~StateSegment();
  StateSegment(const StateSegment&) = delete;
  StateSegment& operator=(const StateSegment&) = delete;

  const std::string& path() const { return path_; }
  // Unavailable once somebody has removed the file: no later process finds what
  // is committed here.
  Status check_kept() const;
  int64_t capacity() const;  // elements of a vector
  uint64_t bytes() const { return bytes_; }

  // --- reading

  struct Committed {
    int buffer = 0;
    uint64_t sequence = 0;
    StateInfo info;
  };
  struct Contents {
    std::vector<Committed> states;     // newest first
    std::vector<std::string> damaged;  // one message per invalid record
  };
  Contents contents() const;
  // Whether that record is still valid: then everything read from the buffer
  // before this call is what the record describes.
  bool is_valid(const Committed& c) const;
  // The first `elements` of each vector of a buffer.
  // REQUIRES: elements <= capacity().
  geometry::ConstStateView read(int buffer, int64_t elements) const;
  // Corrupt when the state has a content hash that differs from the vectors'.
  Status verify_content(const Committed& c) const;

  // --- writing. REQUIRES: made by create() or open(kWrite)

  // Allocates the buffer that create(kHalf) left out. Exhausted.
  Status complete(const std::function<void()>& tick = {}) {
    return populate(bytes_, tick);
  }
  geometry::StateView write(int buffer, int64_t elements);
  // Invalidates the records of `buffer`, which may be written from now on.
  void begin(int buffer);
  // Records what the buffer of the last begin() holds. Returns the new record.
  // REQUIRES: begin() before; info.elements <= capacity().
  Committed commit(const StateInfo& info);
  // Describes the same state differently (a new generation's rank and mesh)
  // without copying it. `c`, which must be valid, stays so until the next
  // begin(); the other record of its buffer becomes invalid.
  Committed redescribe(const Committed& c, const StateInfo& info);

 private:
  StateSegment(std::string path, int fd, void* base, uint64_t bytes, Mode mode);
  static Result<std::unique_ptr<StateSegment>> map(const std::string& path,
                                                   int fd, uint64_t bytes,
                                                   Mode mode);
  static Result<std::unique_ptr<StateSegment>> open_unpopulated(
      const std::string& path, uint64_t job, Mode mode);
  Status populate(uint64_t bytes, const std::function<void()>& tick);
  float* vector(int buffer, size_t i) const;
  Committed publish(size_t slot, int buffer, const StateInfo& info);

  const std::string path_;
  const int fd_;
  std::byte* const base_;
  const uint64_t bytes_;
  const Mode mode_;
  Header* const header_;
  uint64_t next_sequence_ = 1;
  int begun_ = -1;
};

}  // namespace remesh::memory
