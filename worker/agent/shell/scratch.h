// Scratch: the folders for a worker's temporary files, and the lock that makes
// it the only worker of its name on this host.
//
//   ROOT/                 /tmp/remesh-<uid>, mode 0700
//     NAME/lock           held with flock while the worker lives; has its pid
//                         and its incarnation
//     NAME/ranks          pid and start time of each rank started
//     NAME/pmix/          files of PMIx
//     NAME/g7/            of generation 7: rank specs, MPI session
//   SHARED/remesh-<uid>-<hash of ROOT/NAME>/    SHARED: /dev/shm, or another
//                                               tmpfs
//     g7/                 shared memory of MPI
//     state/              training states (state_folder.h)
//     owner               ROOT/NAME
//
// The destructor removes everything but the states, and ROOT if it is empty.
// Whatever a killed worker leaves behind (ranks, files, shared memory) is
// removed when any worker starts or ends under the same root.
//
// States remain until the job no longer needs them; the next worker of the same
// name uses them. Those of a dead worker are removed with the rest once they
// are kStateKeptS old, by any worker of the user with the same SHARED; those of
// a worker that lives once no process has used them for kStateUnclaimedS.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/status.h"
#include "worker/agent/shell/process_control.h"

namespace remesh::agent {

using memory::kSharedMemory;

class Scratch {
 public:
  // AlreadyExists if a live worker still holds the name after `patience_ms` (a
  // killed process takes a moment to disappear). InvalidArgument if `root`
  // belongs to another user or others may write to it, or if `shared` is no
  // folder.
  static Result<std::unique_ptr<Scratch>> open(
      const std::string& root, const std::string& name, int64_t patience_ms = 0,
      const std::string& shared = kSharedMemory);
  // Whether a worker of that name has left states, or has them now.
  static bool has_states_of(const std::string& root, const std::string& name,
                            const std::string& shared = kSharedMemory);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& name() const { return name_; }
  const std::string& folder() const { return folder_; }
  std::string pmix_folder() const { return folder_ + "/pmix"; }
  // `by_clock`, or the successor of the last life's if the clock went back
  // since, unless by more than a day: then that clock was wrong. Known to the
  // next life while the lock file exists.
  uint64_t new_incarnation(uint64_t by_clock);
  // Description of what was cleaned up after a predecessor; "" if nothing.
  const std::string& cleaned() const { return cleaned_; }

  struct Generation {
    std::string folder;  // absolute, exists
    std::string shared;  // for shared memory; in SHARED if there is room
  };
  // `shared_bytes`: what its shared memory needs. Makes again what somebody has
  // removed; AlreadyExists if another worker has taken the name since.
  Result<Generation> make_generation(int64_t generation, uint64_t shared_bytes);
  void remove_generation(int64_t generation);
  // Records a rank, so that a successor can kill it.
  void note_rank(pid_t pid);

  // For the segments of the ranks' states, always in SHARED: creating a segment
  // fails if there is not enough memory.
  std::string state_folder() const;
  Status make_state_folder();
  // Bytes of SHARED that are free or taken by states of the job; none: unknown,
  // or there is no limit.
  std::optional<uint64_t> state_room(uint64_t job) const;
  // To be called every minute: touches the job's states and removes old states
  // of other jobs here and of all jobs of dead workers, and unclaimed ones.
  // With `job` 0 (unknown yet) it leaves this worker's states alone. Returns
  // the number of segments removed.
  int refresh_states(uint64_t job);
  // Removes the job's states; with `of_dead_workers`, also those of dead
  // workers under this root. Returns the number of segments removed.
  int remove_states(uint64_t job, bool of_dead_workers);

 private:
  Scratch() = default;
  Status take_lock(int64_t patience_ms);
  Status write_lock();
  Status put_back();
  std::string name_;
  std::string root_;
  std::string folder_;
  std::string shared_;       // SHARED
  std::string shared_root_;  // this worker's folder there
  std::string cleaned_;
  int lock_fd_ = -1;
  uint64_t incarnation_ = 0;  // of the last life, then of this one
};

// What is left of one worker in SHARED.
struct Leftover {
  std::string folder;  // of its states
  std::string owner;   // ROOT/NAME; "" if unknown
  bool alive = false;  // its worker lives
  uint64_t bytes = 0;
  int64_t step = 0;   // newest
  int64_t age_s = 0;  // since it was used last
  bool removed = false;
};
// Everything of this user. Removes what is no longer kept, and with `all` what
// no worker or rank uses; nothing if `dry_run`.
std::vector<Leftover> clean_host(bool all, bool dry_run,
                                 const std::string& shared = kSharedMemory);

// The folder in `shared` and the state_folder() of the worker with that
// folder() (an absolute path).
std::string shared_root_of(const std::string& folder,
                           const std::string& shared = kSharedMemory);
std::string state_folder_of(const std::string& folder,
                            const std::string& shared = kSharedMemory);
// /tmp/remesh-<uid>
std::string default_scratch_root();

}  // namespace remesh::agent
