// StateSegment: a file in shared memory that holds the training state of one
// rank (fp32 master weights and both moments) twice. A process that is killed
// between any two instructions leaves one whole, described state of some step.
//
//   header   magic, sizes, checksum: written once, never changed
//            two records a buffer: what the buffer holds (StateInfo), each
//            with a checksum and a sequence number
//   buffers  0 and 1, three vectors each
//
// The update reads one buffer and writes the other:
//   begin(b)    takes back what was said of buffer b
//   ...         the owner writes buffer b as it likes
//   commit()    says what it holds now: the sequence number is stored last,
//               by one release store; 0 means: holds nothing
// The largest sequence number is the newest commit. A buffer has two records so
// that a generation which takes a state over as it stands can say so
// (redescribe) before it takes back what the generation before said.
//
// The file outlives its processes: a worker daemon that was killed finds it by
// its name (shelf.h) and reads what was committed. It lies on tmpfs; its pages
// are touched once, when it is made, on huge pages where the kernel grants
// them, and it serves any state that fits (capacity).
//
// Ownership: an object maps the file; it does not remove it. One process at a
// time has it open to write (flock, which ends with the process); any number
// read, also while it is written. Threads: one at a time uses an object.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/memory/state_info.h"
#include "parallel/geometry/state_vectors.h"
#include "proto/base/status.h"

namespace remesh::memory {

// Bytes of a segment whose vectors have up to `capacity` elements.
uint64_t segment_bytes(int64_t capacity);

ContentHash content_hash(const geometry::ConstStateView& state);

class StateSegment {
 public:
  struct Record;
  struct Header;

  // A fresh file at `path` (mode 0600), with nothing committed, for `job` (any
  // number that tells jobs of this host apart). AlreadyExists when the path is
  // taken; Exhausted, with what is needed and what is there, when shared memory
  // is short. Touches all pages: about half a second a GiB. The file appears at
  // `path` only when it is complete; `path`.new is used before.
  static Result<std::unique_ptr<StateSegment>> create(const std::string& path,
                                                      uint64_t job,
                                                      int64_t capacity);
  enum class Mode { kRead, kWrite };
  // Maps an existing one. Corrupt, with the reason, when the file is not a
  // whole segment of this version; InvalidArgument when it is of another job or
  // user; Unavailable when another process has it open to write (kWrite).
  static Result<std::unique_ptr<StateSegment>> open(const std::string& path,
                                                    uint64_t job, Mode mode);
  ~StateSegment();
  StateSegment(const StateSegment&) = delete;
  StateSegment& operator=(const StateSegment&) = delete;

  const std::string& path() const { return path_; }
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
    std::vector<std::string> damaged;  // what does not verify, in words
  };
  Contents contents() const;
  // Whether that record still stands: what was read of the buffer before the
  // question is what it described.
  bool stands(const Committed& c) const;
  // The first `elements` of each vector of a buffer.
  // REQUIRES: elements <= capacity().
  geometry::ConstStateView read(int buffer, int64_t elements) const;
  // Corrupt when the state has a content hash which is not that of the vectors.
  Status verify_content(const Committed& c) const;

  // --- writing. REQUIRES: made by create() or open(kWrite)

  geometry::StateView write(int buffer, int64_t elements);
  // Takes back all that was said of `buffer`, which may be written from now on.
  void begin(int buffer);
  // What was begun holds this. REQUIRES: begin() before; info.elements fits.
  // Returns the new record.
  Committed commit(const StateInfo& info);
  // Says the same state in another way (a new generation's rank and mesh), at
  // no copying. `c`, which must stand, stands until the next begin(); another
  // record of its buffer does not.
  Committed redescribe(const Committed& c, const StateInfo& info);
  // Takes back everything.
  void clear();

 private:
  StateSegment(std::string path, int fd, void* base, uint64_t bytes, Mode mode);
  static Result<std::unique_ptr<StateSegment>> map(const std::string& path,
                                                   int fd, uint64_t bytes,
                                                   Mode mode);
  Status populate();
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
