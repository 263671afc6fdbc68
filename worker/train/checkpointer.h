// Checkpointer: one rank's part in saving the training state, in the background
// or while everybody waits. What is decided is boundary.h; what is written is
// checkpoint/store.
//
// In the background: this rank's share of the state is copied aside, a thread
// writes it, and flags that ride in the next steps' agreement tell rank 0 when
// all shards are there; then rank 0's thread commits. Training never waits for
// a disk.
//
// What copies depends on where the state lives. In place, the boundary does, in
// the owner's thread. Double-buffered, the state of step k stays as it is until
// the update of step k + 2: then the background thread reads it beside the
// computing, right into the memory that the disk is given, and before_update()
// is where an update would wait for a copy that is late (counted and logged).
//
// At a hand-over nothing is saved, and a save under way is given up: the
// generation that follows makes it up at its first boundary (SavePlan), and its
// commit removes what is left of this one.
//
// Threads: one owner thread, which alone talks to other ranks; the file work
// runs in threads of its own, which never touch MPI. What takes long does so at
// low priority; what somebody may wait for (a copy, which is a fifth of a
// second a GiB; a save at a stop) at training's: on a full machine ranks that
// poll for a late one would keep it from its processor. A failed save is
// reported on the board and in the log and leaves nothing behind; training goes
// on.
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
#include "proto/manifest.pb.h"
#include "worker/board/board.h"
#include "worker/engine/agreement.h"
#include "worker/engine/flat_buffer.h"
#include "worker/train/background.h"
#include "worker/train/boundary.h"
#include "worker/train/rank_state.h"
#include "worker/train/train_log.h"

namespace remesh::train {

struct CheckpointerOptions {
  std::string folder;  // of the checkpoints
  int64_t interval = 0;
  store::Retention retention;
  // What every manifest of this generation has in common: all but step,
  // tokens, sequences, time, recent and the shards.
  pb::Manifest manifest;
  int64_t tokens_per_step = 0;
  int64_t sequences_per_step = 0;
  // The state that this generation began with: its step, the generation that
  // made it, and the tokens it had seen.
  int64_t first_step = 0;
  int64_t first_generation = 0;
  int64_t first_tokens = 0;
  // The RankState given to on_step() after step k stays unchanged until the
  // update of step k + 2, before which before_update(k + 2) is called.
  bool double_buffered = false;
};

class Checkpointer {
 public:
  // Borrows everything. `shard` and `zero` are this rank's: what it saves is
  // pieces_to_save() of them. Collective: rank 0 looks which checkpoints there
  // are, and claims their folder (manifest/branch.h).
  Checkpointer(CheckpointerOptions options, FileSystem& fs,
               const geometry::ShardTable& shard,
               const geometry::ZeroPlan& zero, kernels::Backend& backend,
               comm::Comm& world, board::Board& board, TrainLog& log);
  ~Checkpointer();

  // Rank 0: a finished step, to be kept with the next checkpoint.
  void add_metrics(const pb::StepMetrics& metrics);

  // This rank's flags for the next agreement.
  engine::Facts facts() const;
  // After each step, with what was agreed in it. Never waits.
  void on_step(const engine::Facts& agreed, bool stops_here,
               const RankState& state);
  // Collective: completes what is under way, then saves `state` unless that
  // very step is saved already. Waits for the disk, moving the board as long
  // as the disk moves. The same answer on every rank: ok, or why not (in words
  // on the rank it happened to).
  Status save_and_wait(const RankState& state);
  // Returns once the update of step `step` may overwrite the state of step
  // step - 2: at once but when that is still being copied.
  void before_update(int64_t step);
  // Gives up what is under way, as if the process had been killed. Returns at
  // once; the destructor waits for the one operation that the disk is at.
  // Nothing but the destructor may follow.
  void abandon_for_hand_over();
  int64_t saved_step() const { return plan_.saved_step(); }
  // How often before_update() waited.
  int64_t copy_waits() const { return copy_waits_; }

 private:
  Status stage(const RankState& state);
  void start_save(const RankState& state);
  void start_job(std::function<Status()> job);
  void start_write(int64_t step, std::vector<store::Piece<const float>> pieces,
                   bool waited_for);
  void start_copy_and_write(const RankState& state);
  Status write(int64_t step,
               const std::vector<store::Piece<const float>>& pieces,
               uint64_t room, std::function<void()> taken);
  std::vector<store::Piece<const float>> staged_pieces() const;
  void copied();
  manifest::Origin origin() const {
    return {options_.first_step, options_.first_generation};
  }
  int64_t newest_saved() const;
  void start_commit(pb::Manifest manifest);
  void start_abandon(int64_t step);
  pb::Manifest manifest_of(int64_t step) const;
  void note_end(int64_t step, bool counts);
  void report_failure(int64_t step, const Status& status);
  Status finish_under_way();
  Status wait_for_disk();
  bool all_agree(bool ok);

  const CheckpointerOptions options_;
  const geometry::ParamTable& table_;
  kernels::Backend& backend_;
  comm::Comm& world_;
  board::Board& board_;
  TrainLog& log_;
  std::atomic<int64_t> disk_moved_ms_{0};
  std::atomic<bool> give_up_{false};
  std::atomic<bool> hurry_{false};  // everybody waits for the save under way
  std::unique_ptr<FileSystem> fs_;  // notes disk_moved_ms_
  const std::vector<StatePiece> pieces_;  // in the state vectors
  int64_t staged_elements_ = 0;
  const std::vector<StatePiece> packed_;  // in staged_
  SavePlan plan_;
  std::deque<pb::StepMetrics> recent_;  // rank 0: the generation's last steps
  pb::Manifest manifest_;               // rank 0: of the save under way
  Status write_status_;                 // of this rank's shard
  engine::FlatBuffer staged_[3];        // weights, moments; made when needed
  bool have_staging_ = false;
  bool reported_ = false;  // the failure of the save under way
  // The state that the disk thread reads; -1: none.
  std::mutex copy_mutex_;
  std::condition_variable copy_done_;
  int64_t copying_step_ = -1;
  int64_t copy_waits_ = 0;
  int64_t copy_waited_ms_ = 0;
  store::Layouts layouts_;  // used by jobs alone
  BackgroundJob job_;       // last: jobs use the members above
};

}  // namespace remesh::train
