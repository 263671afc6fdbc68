// Scratch: the folders for a worker's temporary files, and the lock that makes
// it the only worker of its name on this host.
//
//   ROOT/                 /tmp/remesh-<uid>, mode 0700
//     NAME/lock           held with flock while the worker lives
//     NAME/ranks          pid and start time of each rank started
//     NAME/pmix/          files of PMIx
//     NAME/g7/            of generation 7: rank specs, MPI session
//   /dev/shm/remesh-<uid>-<hash of ROOT/NAME>/
//     g7/                 shared memory of MPI
//     state/              training states (state_folder.h)
//
// The destructor removes everything but the states, and ROOT if it is empty.
// Whatever a killed worker leaves behind (ranks, files, shared memory) is
// removed when any worker starts or ends under the same root.
//
// States remain until the job no longer needs them; the next worker of the same
// name uses them. Those of a dead worker are removed with the rest once they
// are kStateKeptS old. Until then NAME/lock remains, since it identifies their
// folder.
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
  // AlreadyExists if a live worker still holds the name after `patience_ms` (a
  // killed process takes a moment to disappear). InvalidArgument if `root`
  // belongs to another user.
  static Result<std::unique_ptr<Scratch>> open(const std::string& root,
                                               const std::string& name,
                                               int64_t patience_ms = 0);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& name() const { return name_; }
  const std::string& folder() const { return folder_; }
  std::string pmix_folder() const { return folder_ + "/pmix"; }
  // Description of what was cleaned up after a predecessor; "" if nothing.
  const std::string& cleaned() const { return cleaned_; }

  struct Generation {
    std::string folder;  // absolute, exists
    std::string shared;  // for shared memory; in /dev/shm if there is room
  };
  // `shared_bytes`: what its shared memory needs.
  Result<Generation> make_generation(int64_t generation, uint64_t shared_bytes);
  void remove_generation(int64_t generation);
  // Records a rank, so that a successor can kill it.
  void note_rank(pid_t pid);

  // For the segments of the ranks' states, always in /dev/shm: creating a
  // segment fails if there is not enough memory.
  std::string state_folder() const;
  Status make_state_folder();
  // To be called every minute: touches the job's states and removes old states
  // of other jobs here and of all jobs of dead workers. With `job` 0 (unknown
  // yet) it leaves this worker's states alone. Returns the number of segments
  // removed.
  int refresh_states(uint64_t job);
  // Removes the job's states; with `of_dead_workers`, also those of dead
  // workers under this root. Returns the number of segments removed.
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

// The folder in /dev/shm and the state_folder() of the worker with that
// folder() (an absolute path).
std::string shared_root_of(const std::string& folder);
std::string state_folder_of(const std::string& folder);
// /tmp/remesh-<uid>
std::string default_scratch_root();

}  // namespace remesh::agent
