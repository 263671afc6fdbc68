// Board: the status page of one rank, in memory that its worker daemon shares.
//
// The rank writes its progress, and the daemon reads it without the rank's
// cooperation: it notices a rank that hangs or is stopped, and the last error
// survives a SIGKILL. The daemon writes requests (stop, save). The memory is a
// memfd that the rank inherits, so nothing is left behind when both are dead.
//
// Threads: each field has a single writer. Readers see each field atomically
// but not all fields at the same instant. The step ring has one producer (the
// rank) and one consumer (the daemon).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/memory_use.h"
#include "proto/base/rank_request.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "worker/board/flight.h"

namespace remesh::board {

// Members of a mixture whose validation losses a step record has.
inline constexpr size_t kMostValidated = 16;

// One finished step, written by one rank of each worker.
struct StepRecord {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  bool skipped = false;  // the step made no update
  double lr = 0;
  double tokens_per_s = 0;
  double step_s = 0;
  double time = 0;        // unix seconds
  double val_loss = 0;    // NaN: not validated at this step
  int32_t validated = 0;  // members of a mixture: the number of val_losses
  std::array<double, kMostValidated> val_losses{};
  int64_t tokens = 0;
  // Rates of all ranks together; 0: not measured. The model's floating-point
  // operations (recomputation does not count), and those of the ranks' GEMMs
  // alone: their quotient is the GEMM efficiency.
  double flops_per_s = 0;
  double gemm_flops_per_s = 0;
  double mfu = 0;  // flops_per_s over the theoretical peak; 0: peak unknown
  // Shares of the step's time, mean over the ranks; negative: not measured.
  double exposed_comm = -1;  // waiting for collectives and messages
  double bubble = -1;        // waiting for a neighbouring pipeline stage
  // Digest of the state after this step, if train.digest is set.
  bool has_digest = false;
  uint64_t digest = 0;
};
// As it leaves the rank's host; without what was not measured.
pb::StepMetrics to_metrics(const StepRecord& record, int64_t generation,
                           const pb::Mesh& mesh);

class Board {
 public:
  // Daemon: creates a board, whose fd() the rank must inherit.
  static Result<std::unique_ptr<Board>> create(int64_t generation, int rank);
  // Rank: maps the inherited descriptor. Fails on a wrong size or magic number.
  static Result<std::unique_ptr<Board>> open(int fd);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int fd() const { return fd_; }
  int64_t generation() const;
  int rank() const;
  // The rank's most recent operations.
  FlightRecord& flight() { return flight_; }
  const FlightRecord& flight() const { return flight_; }

  // --- rank side
  void set_phase(pb::RankStatus::Phase phase);  // also a tick()
  void set_step(int64_t step);
  void set_microbatch(int64_t microbatch);  // also a tick()
  void tick();                              // increments progress
  void commit_step(int64_t step);
  void set_checkpoint_step(int64_t step);
  void decline_stop();
  // This rank's own shares of the newest step (see StepRecord).
  void set_shares(double exposed_comm, double bubble);
  void set_memory(const MemoryUse& memory);
  // Digest of the initial state of this generation.
  void set_restored_digest(uint64_t digest);
  void set_link(double bytes_per_s);
  void set_error(std::string_view text);           // truncated to 2 KiB
  void set_checkpoint_error(const Status& error);  // ok: none
  void fail_save(const Status& error);  // counts it, and sets the error
  // Never blocks; false if the ring (4096 steps) is full.
  bool push_step(const StepRecord& record);
  uint32_t request() const;  // kRequestStop ...
  int64_t checkpoint_request() const;
  // The daemon's last heartbeat, in milliseconds of the monotonic clock.
  int64_t daemon_beat_ms() const;

  // --- daemon side
  // The fields that the rank sets, without what it has not measured.
  pb::RankStatus snapshot() const;
  int64_t committed_step() const;  // as in snapshot(), but cheap
  uint64_t progress() const;       // likewise
  std::vector<StepRecord> pop_steps();
  void set_request(uint32_t bits);
  void set_checkpoint_request(int64_t number);
  void beat(int64_t now_ms);

 private:
  struct Page;
  Board(int fd, Page* page);
  int fd_;
  Page* page_;
  FlightRecord flight_;
};

}  // namespace remesh::board
