// The start of a Trainer: from the specification to a state in memory.
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/jobfile/jobfile.h"
#include "worker/train/restore.h"
#include "worker/train/trainer.h"

namespace remesh::train {
namespace {

using board::Phase;

#ifndef REMESH_VERSION
#define REMESH_VERSION "unknown"
#endif

Failure failed(board::ExitCode code, const Status& status) {
  return {code, status.to_string()};
}

// Sizes that do not fit are the job's fault and stay so; the rest may pass.
Failure failed_start(const Status& status) {
  return failed(status.code() == Code::kInvalidArgument
                    ? board::kExitCannotContinue
                    : board::kExitInternal,
                status);
}

}  // namespace

Trainer::Trainer(pb::RankSpec spec, board::Board& board, TrainLog& log,
                 int64_t exec_ms)
    : spec_(std::move(spec)),
      assignment_(spec_.assignment()),
      job_(assignment_.job()),
      board_(board),
      log_(log),
      progress_(&board),
      fs_(manifest::posix_file_system()),
      exec_ms_(exec_ms),
      start_at_ms_(exec_ms) {}

Trainer::~Trainer() = default;

void Trainer::log_start(std::string_view part) {
  const int64_t now = monotonic_ms();
  start_parts_.push_back({part, now - start_at_ms_});
  start_at_ms_ = now;
}

Outcome Trainer::check_spec() {
  const pb::Mesh& m = assignment_.mesh();
  layout_ = {.dp = m.dp(), .pp = m.pp(), .tp = m.tp(), .cp = m.cp()};
  if (layout_.pp != 1 || layout_.tp != 1 || layout_.cp != 1 || layout_.dp < 1)
    return Failure{board::kExitCannotContinue,
                   "mesh " + layout_.to_string() +
                       ": this trainer runs data parallelism alone: dp >= 1, "
                       "and pp, tp and cp 1"};
  if (spec_.has_rank() && spec_.rank() != board_.rank())
    return Failure{board::kExitInternal,
                   fmt::format("the specification is of rank {}, the board of "
                               "rank {}",
                               spec_.rank(), board_.rank())};
  if (!assignment_.has_source() || assignment_.run_dir().empty())
    return Failure{board::kExitUsage,
                   "the specification names no source or no run directory"};
  return {};
}

// Connects and prepares, at the same time where the rank is known beforehand.
Outcome Trainer::start() {
  if (!spec_.has_rank()) {
    if (Outcome o = connect()) return o;
    Outcome o = prepare(mpi_->rank());
    log_start("prepare_ms");
    return o;
  }
  Outcome prepared;
  std::thread beside([&] { prepared = prepare(spec_.rank()); });
  const Outcome connected = connect();
  beside.join();
  log_start("prepare_beyond_mpi_ms");
  return connected ? connected : prepared;
}

// All that needs no peer.
Outcome Trainer::prepare(int rank) {
  const int64_t began_ms = monotonic_ms();
  const int index = layout_.coord(rank).dp;
  if (Outcome o = open_data(index)) return o;
  if (Outcome o = build(rank)) return o;
  if (assignment_.source().kind() == pb::Source::INIT)
    fill_initial_weights(*shard_, *zero_, job_.train().seed(),
                         backend_->threads(), state_.weights.span());
  board_.tick();
  prepare_ms_ = monotonic_ms() - began_ms;
  return {};
}

Outcome Trainer::connect() {
  board_.set_phase(Phase::kConnecting);
  auto mpi = comm::MpiWorld::init(
      {.size = layout_.world(), .rank = spec_.has_rank() ? spec_.rank() : -1});
  if (!mpi.ok()) return failed(board::kExitWorld, mpi.status());
  mpi_ = std::move(mpi).value();
  log_.set_rank(mpi_->rank());
  auto mesh = comm::Mesh::make(mpi_->world(), layout_);
  if (!mesh.ok()) return failed(board::kExitWorld, mesh.status());
  mesh_ = std::move(mesh).value();
  log_start("mpi_ms");
  return {};
}

Outcome Trainer::open_data(int dp_index) {
  auto dataset = data::Dataset::open(job_.data().path());
  if (!dataset.ok()) return failed_start(dataset.status());
  if (dataset->vocab_size() > job_.model().vocab_size())
    return Failure{board::kExitCannotContinue,
                   fmt::format("model.vocab_size: {}, but the data set {} has "
                               "tokens up to {}; allowed: that many or more",
                               job_.model().vocab_size(), dataset->dir(),
                               dataset->vocab_size())};
  const pb::Train& t = job_.train();
  auto batches = BatchSource::make(std::move(dataset).value(),
                                   {.seed = t.seed(),
                                    .seq_len = t.seq_len(),
                                    .global_batch = t.global_batch_size(),
                                    .local_batch = t.local_batch_size(),
                                    .eval_sequences = t.eval_sequences(),
                                    .dp = layout_.dp,
                                    .dp_index = dp_index});
  if (!batches.ok()) return failed_start(batches.status());
  batches_.emplace(std::move(batches).value());
  return {};
}

RankState Trainer::rank_state() {
  return {.step = state_.step,
          .shard = &*shard_,
          .zero = &*zero_,
          .weights = state_.weights.span(),
          .exp_avg = state_.exp_avg.span(),
          .exp_avg_sq = state_.exp_avg_sq.span()};
}

Outcome Trainer::build(int rank) {
  const geometry::ModelConfig config = jobfile::model_config(job_);
  if (const Status s = config.validate(); !s.ok()) return failed_start(s);
  table_.emplace(geometry::ParamTable::llama(config));
  const geometry::Coord coord = layout_.coord(rank);
  auto shard = geometry::ShardTable::make(*table_, layout_, coord,
                                          {0, config.n_layers});
  if (!shard.ok()) return failed_start(shard.status());
  shard_.emplace(std::move(shard).value());
  auto zero = geometry::ZeroPlan::make(*shard_, {}, layout_.dp, coord.dp);
  if (!zero.ok()) return failed_start(zero.status());
  zero_.emplace(std::move(zero).value());
  const int threads = std::max(1, spec_.threads());
  backend_ = kernels::make_cpu_backend(threads);
  const pb::Train& t = job_.train();
  model::StageOptions o{.max_batch = t.local_batch_size(),
                        .max_seq = t.seq_len()};
  if (t.recompute() == "full")
    o.recompute.assign(static_cast<size_t>(config.n_layers),
                       model::Recompute::kFull);
  if (t.dtype() == "bf16") {
    if (backend_->supports_bf16()) {
      o.dtype = model::Dtype::kBf16;
    } else {
      log_.warn("dtype", {{"asked", "bf16"},
                          {"used", "fp32"},
                          {"reason", "this processor has no bf16 instructions"},
                          {"processor", backend_->description()}});
    }
  }
  auto stage = model::Stage::create(*shard_, o, *backend_);
  if (!stage.ok()) return failed_start(stage.status());
  stage_ = std::move(stage).value();
  auto state = TrainState::make(*backend_, table_->num_elements(), layout_.dp);
  if (!state.ok()) return failed_start(state.status());
  state_ = std::move(state).value();
  log_.info(
      "backend",
      {{"processor", backend_->description()},
       {"threads", threads},
       {"parameters", table_->num_elements()},
       {"dtype", stage_->dtype() == model::Dtype::kBf16 ? "bf16" : "fp32"}});
  return {};
}

Outcome Trainer::restore() {
  board_.set_phase(Phase::kRestoring);
  if (Outcome o = restore_state()) return o;
  first_step_ = state_.step;
  stage_->load_weights(state_.weights.span());
  board_.commit_step(state_.step);
  make_step();
  make_checkpointer();
  const pb::Source& source = assignment_.source();
  log_.info("restored", {{"source", source.kind() == pb::Source::CHECKPOINT
                                        ? source.path()
                                        : std::string("init")},
                         {"reason", source.reason()},
                         {"from_step", state_.step}});
  log_start("restore_ms");
  return {};
}

Outcome Trainer::restore_state() {
  const pb::Source& source = assignment_.source();
  if (source.kind() == pb::Source::INIT) {
    exchange_parts(mesh_->data(), *shard_, *zero_, state_.weights.span());
    return {};
  }
  const pb::Train& t = job_.train();
  RankState state = rank_state();
  const auto m = load_checkpoint(
      *fs_, source.path(), source.step(),
      {.model = table_->config(),
       .seed = t.seed(),
       .data_id = batches_->dataset().data_id(),
       .global_batch_size = t.global_batch_size(),
       .seq_len = t.seq_len()},
      mpi_->world(), mesh_->data(), [this] { board_.tick(); }, state);
  if (!m.ok())
    return failed(m.status().code() == Code::kInvalidArgument
                      ? board::kExitCannotContinue
                      : board::kExitBadSource,
                  m.status());
  state_.step = state.step;
  first_tokens_ = m->tokens();
  return {};
}

void Trainer::make_step() {
  const pb::Optimizer& a = job_.optimizer();
  step_ = std::make_unique<Step>(
      *shard_, *stage_, *backend_, mesh_->dp(), mpi_->world(),
      StepOptions{
          .beta1 = a.beta1(),
          .beta2 = a.beta2(),
          .eps = a.eps(),
          .weight_decay = a.weight_decay(),
          .max_norm = job_.train().max_norm(),
          .bucket_elements = job_.parallel().bucket_mb() * (int64_t{1} << 18)},
      progress_);
}

void Trainer::make_checkpointer() {
  const pb::Train& t = job_.train();
  pb::Manifest manifest;
  manifest.set_job(job_.job().name());
  manifest.set_generation(assignment_.generation());
  *manifest.mutable_mesh() = assignment_.mesh();
  *manifest.mutable_model() = manifest::model_info(table_->config());
  manifest.set_seed(t.seed());
  manifest.set_data_id(batches_->dataset().data_id());
  manifest.set_global_batch_size(t.global_batch_size());
  manifest.set_seq_len(t.seq_len());
  manifest.set_code_version(REMESH_VERSION);
  const pb::Checkpoint& c = job_.checkpoint();
  checkpointer_ = std::make_unique<Checkpointer>(
      CheckpointerOptions{
          .folder = c.folder().starts_with('/')
                        ? c.folder()
                        : assignment_.run_dir() + "/" + c.folder(),
          .interval = c.interval(),
          .retention = {.keep_latest_k = c.keep_latest_k(),
                        .keep_every_n = c.keep_every_n()},
          .manifest = std::move(manifest),
          .tokens_per_step = t.global_batch_size() * t.seq_len(),
          .sequences_per_step = t.global_batch_size(),
          .first_step = first_step_,
          .first_tokens = first_tokens_},
      *fs_, *shard_, *zero_, *backend_, mpi_->world(), board_, log_);
}

}  // namespace remesh::train
