// Checkpointer: saves one rank's part of the training state, either in the
// background or while all ranks wait. boundary.h has the decisions and
// checkpoint/store the file formats.
//
// In the background, this rank's part of the state is copied and a thread
// writes the copy. Votes in the agreements of later steps show rank 0 when all
// shards are written; then a thread of rank 0 commits. Training never waits for
// a disk.
//
// Who copies depends on where the state lives. If it is updated in place, the
// owner's thread copies at the boundary. If it is double-buffered, the state of
// step k does not change until the update of step k + 2, so the background
// thread copies it into the write buffers, overlapped with compute. If that
// copy is late, before_update() waits for it, counts the wait and logs it. If
// it has not begun, because the file is not open yet, before_update() copies.
//
// At an in-memory handoff nothing is saved and a save in progress is abandoned.
// If it was due by the interval, the next generation saves at its first
// boundary (SavePlan); who asked for one asks again. The next commit removes
// the remains.
//
// Threads: one owner thread, which alone communicates with other ranks. File
// work runs in background threads, which never call MPI. Long work has low
// priority. Work that a rank may wait for (a copy, which takes 0.2 s per GiB; a
// save at a stop) has the priority of training: on a fully loaded host, the
// ranks that poll for it would otherwise keep it from the processor.
//
// A failed save is reported on the board and in the log and leaves no files;
// training continues.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/store/store.h"
#include "parallel/comm/comm.h"
#include "parallel/geometry/sharding.h"
#include "parallel/geometry/state_vectors.h"
#include "proto/manifest.pb.h"
#include "worker/board/board.h"
#include "worker/engine/agreement.h"
#include "worker/engine/flat_buffer.h"
#include "worker/train/background_job.h"
#include "worker/train/boundary.h"
#include "worker/train/train_log.h"

namespace remesh::train {

// A read-only view of the training state of one rank. Borrows the vectors,
// which are in the order of ZeroPlan::state_offset.
struct RankState {
  int64_t step = 0;  // updates made
  geometry::ConstStateView vectors;
};

struct CheckpointerOptions {
  std::string folder;  // for checkpoints
  int64_t interval = 0;
  store::Retention retention;
  // What all manifests of this generation have in common: everything but step,
  // tokens, sequences, time, recent and the shards.
  pb::Manifest manifest;
  int64_t tokens_per_step = 0;
  int64_t sequence_offset = 0;
  int64_t sequences_per_step = 0;
  // The initial state of this generation: its step, the generation that made it
  // and the tokens it had consumed.
  int64_t first_step = 0;
  int64_t first_generation = 0;
  int64_t first_tokens = 0;
  // The RankState passed to on_step() after step k does not change until the
  // update of step k + 2, which before_update(k + 2) precedes.
  bool double_buffered = false;
};

class Checkpointer {
 public:
  // Borrows everything. The rank saves pieces_to_save(rank). Collective: rank 0
  // looks up the existing checkpoints and claims their folder
  // (manifest/branch.h).
  Checkpointer(CheckpointerOptions options, FileSystem& fs,
               const geometry::RankShard& rank, kernels::Backend& backend,
               comm::Comm& world, board::Board& board, TrainLog& log);
  ~Checkpointer();

  // Rank 0: adds a finished step, whose metrics later checkpoints include.
  void add_metrics(const pb::StepMetrics& metrics);

  // This rank's votes for the next agreement.
  engine::StepVotes votes() const;
  // To be called after each step with its agreed votes. Never waits.
  void on_step(const engine::StepVotes& agreed, bool stops_here,
               const RankState& state);
  // Collective: completes the save in progress, then saves `state` unless its
  // step is saved already. Waits for the disk, and ticks the board as long as
  // the disk makes progress. Succeeds or fails on all ranks alike; the rank
  // that failed returns the cause.
  Status save_and_wait(const RankState& state);
  // Returns when the update of step `step` may overwrite the state of step
  // step - 2: waits for its copy, at memory speed, or makes it.
  void before_update(int64_t step);
  // Abandons the save in progress, as if the process had been killed. Returns
  // immediately; the destructor waits for the current disk operation. Only the
  // destructor may be called afterwards.
  void abandon_for_handoff();
  int64_t saved_step() const { return plan_.saved_step(); }
  // What the board says while no save fails.
  void set_lasting_error(Status error) {
    lasting_error_ = std::move(error);
    board_.set_checkpoint_error(lasting_error_);
  }
  // How often before_update() waited or copied, from the beginning of each.
  // From any thread.
  int64_t copy_waits() const { return copy_waits_; }

 private:
  Status claim();
  Status stage(const RankState& state);
  void start_save(const RankState& state);
  void start_job(std::function<Status()> job);
  void start_copy_and_write(const RankState& state);
  Status write(int64_t step, const std::vector<geometry::Piece>& pieces,
               const geometry::ConstStateView& vectors, uint64_t room);
  Status write_staged(int64_t step);
  Status copy_and_write(const RankState& state);
  Status begin_copy();
  void end_copy();
  manifest::Origin origin() const {
    return {options_.first_step, options_.first_generation};
  }
  int64_t newest_saved() const;
  void start_commit(pb::Manifest manifest);
  void start_abandon(int64_t step);
  pb::Manifest manifest_of(int64_t step) const;
  void note_end(int64_t step, bool committed);
  void report_failure(int64_t step, const Status& status);
  Status finish_save();
  void wait_for_disks();
  bool all_agree(bool ok);
  Status first_failure(const Status& own);

  const CheckpointerOptions options_;
  const geometry::ParamTable& table_;
  kernels::Backend& backend_;
  comm::Comm& world_;
  board::Board& board_;
  TrainLog& log_;
  std::atomic<int64_t> disk_moved_ms_{0};
  std::atomic<bool> give_up_{false};
  std::atomic<bool> hurry_{false};             // all ranks wait for the save
  std::unique_ptr<FileSystem> fs_;             // updates disk_moved_ms_
  const std::vector<geometry::Piece> pieces_;  // in the state vectors
  int64_t staged_elements_ = 0;
  const std::vector<geometry::Piece> packed_;  // in staged_
  SavePlan plan_;
  std::deque<pb::StepMetrics> recent_;  // rank 0: the generation's last steps
  pb::Manifest manifest_;               // rank 0: of the current save
  Status write_status_;                 // of this rank's shard
  engine::FlatBuffer staged_[3];        // weights, moments; allocated on demand
  bool have_staging_ = false;
  bool unfinished_removed_ = false;  // of older generations; for jobs
  bool claimed_ = false;             // the folder; rank 0, for jobs
  Status lasting_error_;
  bool reported_ = false;  // a failure of the current save was reported
  // Of the state that is to be saved: a job will copy it (kDue) and does so
  // (kUnderWay), or before_update() did before the job began (kStaged).
  enum class Copy { kNone, kDue, kUnderWay, kStaged };
  std::mutex copy_mutex_;
  std::condition_variable copy_done_;
  Copy copy_ = Copy::kNone;
  RankState copied_;
  Status staged_status_;
  std::atomic<int64_t> copy_waits_ = 0;
  int64_t copy_waited_ms_ = 0;
  BackgroundJob job_;  // last: jobs use the members above
};

}  // namespace remesh::train
