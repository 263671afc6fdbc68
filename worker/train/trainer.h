// Trainer: one MPI rank of one generation, from start to end.
//
// Its only input is the RankSpec: mesh, job and the source of the state. It
// checks the MPI world against the mesh, restores the state, trains up to
// train.steps or until the board requests a stop, saves, and ends with an
// ExitCode. It never communicates with the coordinator: its results are on the
// board, in its log and in the checkpoints.
//
// Threads: run() and all of MPI belong to the calling thread. Other threads
// write files and watch that the daemon lives. While MPI connects, which is
// mostly waiting for peers, another thread prepares everything that needs none.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/comm/mesh.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/param_table.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"
#include "worker/engine/engine.h"
#include "worker/trace/traced_comm.h"
#include "worker/trace/tracer.h"
#include "worker/train/background_job.h"
#include "worker/train/batch_source.h"
#include "worker/train/checkpointer.h"
#include "worker/train/replication.h"
#include "worker/train/state_home.h"
#include "worker/train/step_policy.h"
#include "worker/train/train_log.h"

namespace remesh::train {

class Trainer {
 public:
  // `board` and `log` must outlive the trainer. `exec_ms` is when the process
  // was started, on the monotonic clock; the log has the time of each part
  // since.
  Trainer(pb::RankSpec spec, board::Board& board, TrainLog& log,
          int64_t exec_ms);
  ~Trainer();

  // On failure the process must end at once (_exit) with exit_code(), without
  // destroying this object: MPI would wait for its peers.
  Status run();
  ExitCode exit_code() const { return exit_code_; }

 private:
  Status fail(ExitCode code, Status status) {
    exit_code_ = code;
    return status;
  }
  Status fail_start(Status status);
  Status note_input(Status status);
  Status check_spec();
  Status start();
  Status connect();
  Status prepare(int rank);
  // Of the assignment.
  geometry::Shares shares() const {
    return {assignment_.microbatches().begin(),
            assignment_.microbatches().end()};
  }
  Status open_data(int dp_index);
  Status or_rescue(Status opened, const std::string& known);
  const std::string& data_id() const {
    return batches_ ? batches_->dataset().data_id() : assignment_.data_id();
  }
  Status make_backend();
  Status build(int rank);
  Status join();
  RankState rank_state() {
    return {.step = engine_->step(), .vectors = engine_->state()};
  }
  model::Dtype dtype();
  bool agree_on_dtype();
  Status check_inputs();
  Result<std::vector<engine::ParamRule>> param_rules();
  Result<engine::EngineOptions> engine_options();
  Status restore();
  Status restore_state();
  Status restore_memory();
  Status fail_to_load(ExitCode code, Status status);
  Status begin_replicas();
  void make_checkpointer();
  Status train();
  Status one_step(int64_t step, double lr, bool& stop);
  board::StepRecord record_of(int64_t step, double lr,
                              const engine::StepResult& result,
                              int64_t began_ns) const;
  void after_first_step();
  Status validate(board::StepRecord* record);
  void log_step(const board::StepRecord& record,
                const engine::StepSeconds& times);
  bool first_of_worker() const;
  void publish(const board::StepRecord& record);
  void before_agreement();
  void poll_replica() {
    if (!replication_->done() && replication_->poll()) update_committed();
  }
  void update_committed();
  uint64_t digest();
  void remove_unused_segments();
  Status boundary(const engine::StepVotes& agreed, bool& stop);
  void check_state_kept();
  Status replicate_last();
  Status save_last(bool last, bool must, bool& stop);
  Status stop_without_step(bool& stop);
  engine::StepVotes votes() const;
  void measure_gemms();
  void trace(int64_t step);
  void log_start(std::string_view part);  // a literal, which is kept

  const pb::RankSpec spec_;
  const pb::Assignment& assignment_;
  const pb::Job& job_;
  board::Board& board_;
  TrainLog& log_;
  geometry::Layout layout_;
  // Of the process when run() fails; fail() sets it.
  ExitCode exit_code_ = kExitInternal;

  std::unique_ptr<comm::MpiWorld> mpi_;
  std::unique_ptr<trace::Tracer> tracer_;
  std::unique_ptr<comm::Comm> world_;  // of mpi_, traced
  std::unique_ptr<comm::Mesh> mesh_;
  bool unreadable_ = false;             // an input; set by note_input()
  std::optional<BatchSource> batches_;  // absent: a rescue without data
  bool can_train_ = true;  // no rank lacks its data or frozen weights
  std::unique_ptr<kernels::Backend> backend_;
  model::Dtype dtype_ = model::Dtype::kFp32;  // of the operands of GEMMs
  std::optional<geometry::ParamTable> table_;
  std::unique_ptr<StateHome> home_;  // null: the engine owns the state
  bool state_lost_ = false;          // check_state_kept() has failed
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<Replication> replication_;  // null: no replicas
  BackgroundJob trace_job_;                   // writes the trace
  std::thread sweeper_;                       // removes old segments
  std::unique_ptr<FileSystem> fs_;
  std::unique_ptr<Checkpointer> checkpointer_;
  StopPolicy stop_policy_;
  StepPolicy step_policy_;
  int64_t first_step_ = 0;
  int64_t first_generation_ = 0;  // generation that made first_step_
  int64_t first_tokens_ = 0;
  bool peers_have_bf16_ = true;
  std::string base_fingerprint_;  // of the frozen model; "" without adapters
  std::string init_fingerprint_;  // of other weights to start from
  double flops_per_token_ = 0;
  int64_t published_step_ = -1;  // newest step with published metrics
  int64_t committed_step_ = -1;  // newest step that the board has as finished
  std::vector<board::StepRecord> unpushed_;  // the step ring was full
  int64_t exec_ms_;
  std::vector<Kv> start_parts_;  // duration of each part of the start, in ms
  int64_t prepare_ms_ = 0;
  double gemm_flops_per_s_ = 0;  // of this rank; 0: not measured yet
  int64_t start_at_ms_;
};

}  // namespace remesh::train
