// Engine: training steps of one rank of any mesh: data, pipeline, tensor and
// context parallelism, sharded as ZeRO 0 to 3, in any schedule.
//
//   forward and backward of this rank's microbatches, as the schedule lists
//     them (geometry/schedule.h), activations to and from the neighbouring
//     stages (pipe_links.h), gradients summed during backward (grad_store.h)
//   one small all-reduce over all ranks: loss, gradient norm, and everything
//     else that they must agree on at this boundary (agreement.h)
//   clip, AdamW on this rank's update ranges, new compute weights to the ranks
//     that need them (weight_store.h)
//
// It knows nothing of files, daemons, jobs or the progress of training: it is
// given weights, microbatches and a learning rate.
//
// Life cycle:
//   prepare()    makes tables, memory and, where possible, stages. Needs no
//                peer, so another thread may start MPI at the same time.
//   state        fill begin_state(), for this rank's shard() and zero(), and
//                commit_state(); or set_step() when the store holds it already
//   connect()    makes the groups; collective over the mesh's world
//   state_loaded()  when every rank has its state
//   run(), evaluate() any number of times
//
// Bits: the gradient is weighted by 1 / (tokens of the global batch) on every
// mesh, and where some have no target, scaled before the update. Gradients are
// added over microbatches in ascending order, then over the data group in rank
// order. So for one dp, tp, cp and list of microbatches the losses have the
// same bits in every schedule and ZeRO stage (one shard group); on another mesh
// they differ by rounding. Squares of the gradient are summed unit by unit, and
// units in the model's order, so the norm does not depend on pp, schedule or
// ZeRO stage. A tied embedding is summed over both ends of the pipeline, so its
// bits depend on whether there is one.
//
// Ownership: owns gradients, stages and, unless it is given a StateStore, the
// state; borrows table, mesh, backend and store, which must outlive it.
// Threads: one at a time; run() uses the mesh's comms.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/mesh.h"
#include "parallel/geometry/batch.h"
#include "parallel/geometry/schedule.h"
#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/sharding.h"
#include "parallel/geometry/zero.h"
#include "worker/board/board.h"
#include "worker/engine/agreement.h"
#include "worker/engine/flat_buffer.h"
#include "worker/engine/grad_store.h"
#include "worker/engine/optimizer.h"
#include "worker/engine/pipe_links.h"
#include "worker/engine/state_store.h"
#include "worker/engine/timed_comm.h"
#include "worker/engine/units_needed.h"
#include "worker/engine/weight_store.h"
#include "worker/kernels/backend.h"
#include "worker/model/stage.h"
#include "worker/trace/tracer.h"

namespace remesh::engine {

struct EngineOptions {
  geometry::ZeroOptions zero;
  geometry::ScheduleKind schedule = geometry::ScheduleKind::k1F1B;
  int chunks = 1;  // model chunks per pipeline rank
  // For layers 0, k, 2k, ... with k = recompute_every; the others keep all.
  model::Recompute recompute = model::Recompute::kNone;
  int recompute_every = 1;
  model::Dtype dtype = model::Dtype::kFp32;
  int64_t num_microbatches = 1;  // of the global batch
  geometry::Shares shares;       // of the data-parallel ranks
  int64_t max_batch = 1;         // sequences a microbatch
  int64_t max_seq = 1;           // tokens a sequence
  OptimizerOptions optimizer;
  double z_loss = 0;  // model::StageOptions::z_loss
  int64_t bucket_elements = int64_t{1} << 21;
};

struct StepInput {
  double lr = 0;
  // This data-parallel rank's part of the global batch (geometry/batch.h), in
  // order; at most as many as the schedule has. The same on all ranks with
  // one dp coordinate: tokens and targets of complete sequences, (B, T).
  std::span<const model::MicroBatch> microbatches;
  int64_t global_tokens = 0;  // of all ranks
  // Called just before the agreement for this rank's requests and save flags;
  // the engine fills in the sums. May be empty.
  std::function<StepVotes()> votes;
  // Whether to make the update of a step with this loss and gradient norm;
  // asked on every rank, with the same numbers. May be empty: yes.
  std::function<bool(double loss, double grad_norm)> accept;
};

// Of this rank.
struct StepSeconds {
  double compute = 0;   // passes
  double pipeline = 0;  // waiting for a neighbouring stage, the bubble
  double tensor = 0;    // waiting for tensor-parallel ranks
  double context = 0;   // waiting for context-parallel ranks
  double reduce = 0;    // waiting for sums of gradients
  double gather = 0;    // waiting for weights
  double agree = 0;     // in the agreement, including slower ranks
  double update = 0;    // clip, AdamW, loading weights
  // Waiting for collectives and messages, without the bubble.
  double exposed() const { return tensor + context + reduce + gather + agree; }
};

struct StepResult {
  // Mean over the targets of the global batch, nats; 0 if there are none.
  double loss = 0;
  double grad_scale = 1;  // what makes the gradient one of that mean
  double grad_norm = 0;   // global L2, before clipping
  bool skipped = false;   // the step made no update
  StepVotes agreed;       // summed over all ranks
  StepSeconds times;
  // Means over all ranks, up to the agreement: exposed() and the bubble.
  double mean_exposed_s = 0, mean_bubble_s = 0;
};

struct Evaluation {
  double loss_sum = 0;  // nats, over all ranks
  double targets = 0;   // that it covers
};

// The model that adapters belong to (ModelConfig::lora), frozen: a rank's part
// of it, as without ZeRO.
struct FrozenBase {
  geometry::ParamTable table;
  geometry::RankShard rank_shard;
  FlatBuffer weights;
};

// Reports to the rank's status page; without one it does nothing.
class Progress {
 public:
  Progress() = default;
  explicit Progress(board::Board* board) : board_(board) {}
  void phase(pb::RankStatus::Phase p) const {
    if (board_ != nullptr) board_->set_phase(p);
  }
  void microbatch(int64_t i) const {
    if (board_ != nullptr) board_->set_microbatch(i);
  }
  void tick() const {
    if (board_ != nullptr) board_->tick();
  }

 private:
  board::Board* board_ = nullptr;
};

class Engine {
 public:
  // For rank `rank` of a mesh of that layout. Fails, saying what is allowed,
  // when the model, schedule, ZeRO options or sizes do not admit the layout;
  // with kExhausted when memory is short. `state`: a store not reserved yet, or
  // nullptr to keep the state in private memory and update it in place.
  static Result<std::unique_ptr<Engine>> prepare(
      const geometry::ParamTable& table, const geometry::Layout& layout,
      int rank, const EngineOptions& options, kernels::Backend& backend,
      Progress progress, StateStore* state = nullptr);
  // Collective. REQUIRES: the mesh has this layout and this rank's coordinates.
  // Fails, on this rank alone, like prepare().
  Status connect(comm::Mesh& mesh);
  ~Engine();
  // Records passes and updates of the following steps; nullptr: nothing. The
  // tracer must outlive the engine.
  void set_tracer(trace::Tracer* tracer) { tracer_ = tracer; }
  // Called wherever communication is advanced: between the units of a pass and
  // while waiting for sums. For other communication that overlaps with compute;
  // must be quick.
  void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }

  // --- state: this rank's update ranges, in the order of
  // ZeroPlan::state_offset ---
  const geometry::RankShard& rank_shard() const { return rank_shard_; }
  const geometry::ShardTable& shard() const { return rank_shard_.shard; }
  const geometry::ZeroPlan& zero() const { return rank_shard_.zero; }
  const geometry::Sharding& sharding() const { return sharding_; }
  ConstStateView state() const { return state_->current(); }
  std::span<const float> weights() const { return state().weights; }
  std::span<const float> exp_avg() const { return state().exp_avg; }
  std::span<const float> exp_avg_sq() const { return state().exp_avg_sq; }
  int64_t step() const { return step_; }  // steps made, skipped ones too
  void set_step(int64_t step) { step_ = step; }
  // Writes a state from outside: StateStore::begin() and commit().
  StateView begin_state() { return state_->begin(); }
  void commit_state(int64_t step) {
    state_->commit(step);
    step_ = step;
  }
  // Without adapters nullptr. To be filled in before state_loaded().
  FrozenBase* base() { return base_.get(); }
  // Loads the compute weights from the state vectors just written. Collective
  // over the data group.
  void state_loaded();

  // Makes update number step() + 1, or leaves the state as it is if the step is
  // not accepted. Fails, on every rank alike and with the state untouched, when
  // the loss or gradient norm of an accepted step is not finite. Collective.
  Result<StepResult> run(const StepInput& in);
  // Forward passes only. A rank may have any number of microbatches, even none;
  // all ranks with one dp coordinate have the same ones. Collective, with the
  // same result on every rank.
  Result<Evaluation> evaluate(std::span<const model::MicroBatch> microbatches);

  // The summed, unclipped gradient of unit u's update range; valid from one
  // run() to the next.
  std::span<const float> gradient(size_t unit) { return grads_->reduced(unit); }
  // Stage of a chunk of this rank. REQUIRES: connected.
  model::Stage& stage(int chunk) {
    return *stages_[static_cast<size_t>(chunk)];
  }
  // Bytes held now, by purpose.
  MemoryUse memory() const;

 private:
  class Hooks;

  Engine(const geometry::ParamTable& table, const EngineOptions& options,
         kernels::Backend& backend, Progress progress, StateStore* state);
  Status init(const geometry::Layout& layout, int rank);
  Status make_base(int rank);
  Status make_state();
  Status make_stages();
  model::StageOptions stage_options(int chunk, int slots) const;
  void make_groups(comm::Mesh& mesh);

  // No tensor, no context parallelism.
  bool single() const {
    return rank_shard_.shard.layout().tp == 1 &&
           rank_shard_.shard.layout().cp == 1;
  }
  bool first_stage(int chunk) const {
    return rank_shard_.shard.has_embedding(chunk);
  }
  bool last_stage(int chunk) const { return rank_shard_.shard.has_head(chunk); }
  int64_t elements(const model::MicroBatch& mb) const {
    return stages_.front()->stream_rows(mb.B, mb.T) * table_.config().dim;
  }
  void take_part(std::span<const model::MicroBatch> sequences);
  // Announces what the passes receive from neighbouring stages.
  Status expect(const std::vector<geometry::PipeOp>& ops);
  Status run_passes(const StepInput& in, StepVotes& votes);
  Status run_pass(const geometry::PipeOp& op, double scale, StepVotes& votes);
  Status forward(const geometry::PipeOp& op, StepVotes& votes);
  Status backward(const geometry::PipeOp& op, double scale);
  Status evaluate_pass(const geometry::PipeOp& op, StepVotes& votes);
  void join(const geometry::PipeOp& op);
  void count(const model::MicroBatch& mb, double loss, StepVotes& votes) const;
  StepResult agree(const StepInput& in, StepVotes votes, StepSeconds times);
  void update(double lr, double grad_scale, bool skip);

  const geometry::ParamTable& table_;
  const EngineOptions options_;
  kernels::Backend& backend_;
  const Progress progress_;
  trace::Tracer* tracer_ = nullptr;
  std::function<void()> poll_;

  geometry::RankShard rank_shard_;
  geometry::Schedule schedule_;  // of a step
  geometry::Sharding sharding_;
  std::unique_ptr<FrozenBase> base_;       // null without adapters
  std::unique_ptr<StateStore> own_state_;  // when no store is given
  StateStore* const state_;
  int64_t step_ = 0;
  StepSeconds waited_;  // of the step in progress
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<GradStore> grads_;
  std::unique_ptr<PipeLinks> links_;
  comm::Mesh* mesh_ = nullptr;
  std::unique_ptr<TimedComm> tp_, cp_;                 // the mesh's, if not 1
  std::vector<std::unique_ptr<comm::Comm>> groups_;    // made from the mesh's
  std::vector<std::unique_ptr<model::Stage>> stages_;  // by chunk
  std::unique_ptr<Hooks> hooks_;

  // State of the passes in progress.
  std::vector<model::MicroBatch> microbatches_;  // this rank's part of each
  std::vector<int32_t> part_tokens_;
  std::vector<std::vector<int>> free_slots_;  // by chunk
  std::vector<std::vector<int>> slot_of_;     // by chunk and microbatch
};

}  // namespace remesh::engine
