// Scratch: the worker's folder for what must not outlive it, and the proof
// that it is the only worker of its name on this host.
//
//   ROOT/                 /tmp/remesh-<uid>, mode 0700
//     NAME/lock           flock'ed while the worker lives
//     NAME/ranks          pid and start time of each rank started
//     NAME/pmix/          PMIx's files
//     NAME/g7/            of generation 7: rank specs, MPI's session
//   /dev/shm/remesh-<uid>-<hash of ROOT/NAME>/
//     g7/                 MPI's shared memory
//     state/              training states (states.h)
//
// All of it but states goes when the object does, ROOT too when it is empty.
// What a killed worker left (ranks, files, shared memory) goes when a worker of
// any name starts or ends below the same root.
//
// States stay until somebody says that they are not needed: the next worker of
// the name takes them over. Those of a dead worker that nobody has touched for
// kStateKeptS go with the rest; NAME/lock stays as long as they do, for it
// tells where they are.
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

  // For the segments of the ranks' states, in RAM whatever they need: whoever
  // makes one sees whether there is room.
  std::string state_folder() const;
  Status make_state_folder();
  // For every minute: the job's states stay young; here, those of other jobs go
  // when they are old, and so do all of dead workers. `job` 0: not known yet,
  // any here may be its. The number of segments removed.
  int refresh_states(uint64_t job);
  // The job does not need them any more; with `of_dead_workers`, nor those
  // below dead workers of this root. The number of segments removed.
  int remove_states(uint64_t job, bool of_dead_workers);

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

// The folder in /dev/shm and the state_folder() of the worker whose folder this
// is (absolute).
std::string shared_root_of(const std::string& folder);
std::string state_folder_of(const std::string& folder);
// /tmp/remesh-<uid>
std::string default_scratch_root();

}  // namespace remesh::agent
