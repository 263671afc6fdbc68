// Scratch: the worker's folder for what must not outlive it, and the proof
// that it is the only worker of its name on this host.
//
//   ROOT/                 /tmp/remesh-<uid>, mode 0700
//     NAME/lock           flock'ed while the worker lives
//     NAME/ranks          pid and start time of each rank started
//     NAME/pmix/          PMIx's files
//     NAME/g7/            of generation 7: rank specs, MPI's session
//   /dev/shm/remesh-<uid>-<hash of ROOT/NAME>/g7/   MPI's shared memory
//
// All of it goes when the object does, ROOT too when it is empty. What a killed
// worker left (ranks, files, shared memory) goes when a worker of any name
// starts or ends below the same root.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/agent/shell/process.h"

namespace remesh::agent {

class Scratch {
 public:
  // AlreadyExists when a live worker holds the name, and goes on holding it for
  // `patience_ms`: one that was just killed takes a moment to be gone.
  // InvalidArgument when `root` belongs to somebody else.
  static Result<std::unique_ptr<Scratch>> open(const std::string& root,
                                               const std::string& name,
                                               int64_t patience_ms = 0);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& name() const { return name_; }
  const std::string& folder() const { return folder_; }
  std::string pmix_folder() const { return folder_ + "/pmix"; }
  // In /dev/shm; exists while a generation does.
  const std::string& shared_root() const { return shared_root_; }
  // What the predecessor left, in words; "" when nothing.
  const std::string& cleaned() const { return cleaned_; }

  struct Generation {
    std::string folder;  // absolute, exists
    std::string shared;  // for shared memory; in RAM where there is room
  };
  // `shared_bytes`: room its shared memory needs.
  Result<Generation> make_generation(int64_t generation, uint64_t shared_bytes);
  void remove_generation(int64_t generation);
  // Remembers a rank, so that a successor can make sure it is dead.
  void note_rank(pid_t pid);

 private:
  Scratch() = default;
  Status take_lock(int64_t patience_ms);
  std::string name_;
  std::string root_;
  std::string folder_;
  std::string shared_root_;
  std::string cleaned_;
  int lock_fd_ = -1;
};

// The shared_root() of the worker whose folder this is (absolute).
std::string shared_root_of(const std::string& folder);
// /tmp/remesh-<uid>
std::string default_scratch_root();

}  // namespace remesh::agent
