// The start of a Trainer: from the RankSpec to a state in memory.
#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "checkpoint/store/store.h"
#include "parallel/geometry/model_work.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/param_groups.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/version.h"
#include "proto/rundir/paths.h"
#include "worker/train/link.h"
#include "worker/train/restore.h"
#include "worker/train/trainer.h"

namespace remesh::train {

Trainer::Trainer(pb::RankSpec spec, board::Board& board, TrainLog& log,
                 int64_t exec_ms)
    : spec_(std::move(spec)),
      assignment_(spec_.assignment()),
      job_(assignment_.job()),
      board_(board),
      log_(log),
      fs_(posix_file_system()),
      step_policy_({.most_skipped = job_.train().max_skipped_steps(),
                    .spike_factor = job_.train().spike_factor()},
                   assignment_.past_steps()),
      exec_ms_(exec_ms),
      start_at_ms_(exec_ms) {}

Trainer::~Trainer() = default;

void Trainer::log_start(std::string_view part) {
  const int64_t now = monotonic_ms();
  start_parts_.push_back({part, now - start_at_ms_});
  start_at_ms_ = now;
}

// Notes whether this is an input that cannot be read now. In a job that has
// made steps with it, that is no error in the job and may pass, however long it
// takes.
Status Trainer::note_input(Status status) {
  unreadable_ = is_unreadable(status.code()) &&
                assignment_.source().kind() != pb::Source::INIT;
  return status;
}

// Sizes that do not fit are an error in the job and permanent, and so is what
// the host does not permit; other failures may be transient.
Status Trainer::fail_start(Status status) {
  if (unreadable_) return fail(kExitUnreadable, std::move(status));
  if (home_ != nullptr && home_->exit_code())
    return fail(*home_->exit_code(), std::move(status));
  const bool permanent =
      status.code() == Code::kInvalidArgument || status.code() == Code::kDenied;
  return fail(permanent ? kExitFailed : kExitInternal, std::move(status));
}

Status Trainer::check_spec() {
  layout_ = manifest::layout_of(assignment_.mesh());
  if (layout_.dp < 1 || layout_.pp < 1 || layout_.tp < 1 || layout_.cp < 1)
    return fail(kExitFailed,
                invalid_argument("mesh " + layout_.to_string() +
                                 ": every degree must be at least 1"));
  if (spec_.has_rank() && spec_.rank() != board_.rank())
    return internal(
        fmt::format("the specification is for rank {}, the board for rank {}",
                    spec_.rank(), board_.rank()));
  if (!assignment_.has_source() || assignment_.run_dir().empty())
    return fail(kExitUsage,
                invalid_argument(
                    "the specification lacks a source or a run directory"));
  return ok_status();
}

// Connects and prepares, concurrently if the rank is known beforehand.
Status Trainer::start() {
  if (Status s = make_backend(); !s.ok()) return fail_start(std::move(s));
  Status connected, prepared;
  if (!spec_.has_rank()) {
    connected = connect();
    if (connected.ok()) {
      agree_on_dtype();
      prepared = prepare(mpi_->rank());
    }
    log_start("prepare_ms");
  } else {
    std::thread preparing([&] { prepared = prepare(spec_.rank()); });
    connected = connect();
    // It waits for its own thread, not for others: a hang is this rank's.
    if (connected.ok()) board_.set_phase(pb::RankStatus::RESTORING);
    preparing.join();
    log_start("prepare_beyond_mpi_ms");
  }
  // Report a permanent error before a retryable one.
  if (!prepared.ok()) prepared = fail_start(std::move(prepared));
  if (!connected.ok() && exit_code_ != kExitFailed)
    return fail(kExitWorld, std::move(connected));
  RETURN_IF_ERROR(prepared);
  if (spec_.has_rank() && agree_on_dtype()) {
    replication_.reset();
    engine_.reset();
    home_.reset();
    if (Status s = prepare(spec_.rank()); !s.ok())
      return fail_start(std::move(s));
  }
  return join();
}

// Does what needs both this rank's engine and its peers.
Status Trainer::join() {
  if (Status s = engine_->connect(*mesh_); !s.ok())
    return fail_start(std::move(s));
  engine_->set_tracer(tracer_.get());
  log_.info("engine",
            {{"mesh", layout_.to_string()},
             {"parameters_here", engine_->shard().num_elements()},
             {"state_here", engine_->zero().state_elements()},
             {"zero_stage", engine_->zero().stage()},
             {"shard_group", engine_->zero().shard_size()},
             {"dtype", dtype_ == model::Dtype::kBf16 ? "bf16" : "fp32"}});
  return ok_status();
}

// MPI_Init sets environment variables, which frees memory that a concurrent
// getenv() reads, and oneDNN and HDF5 read their variables when they are first
// used. So this comes before the thread that prepares, and the description
// makes oneDNN look at the processor.
Status Trainer::make_backend() {
  store::initialize();
  const int threads = std::max(1, spec_.threads());
  ASSIGN_OR_RETURN(backend_,
                   kernels::make_backend(job_.train().backend(), threads));
  log_.info("backend",
            {{"processor", backend_->description()}, {"threads", threads}});
  return ok_status();
}

// Prepares everything that needs no peer.
Status Trainer::prepare(int rank) {
  const int64_t began_ms = monotonic_ms();
  RETURN_IF_ERROR(note_input(
      or_rescue(open_data(layout_.coord(rank).dp), assignment_.data_id())));
  RETURN_IF_ERROR(build(rank));
  base_fingerprint_ = job_.lora().base_fingerprint();
  if (engine::FrozenBase* const base = engine_->base())
    RETURN_IF_ERROR(
        note_input(or_rescue(load_initial_weights(
                                 *fs_, jobfile::init_path(job_.model()),
                                 base->rank_shard, [this] { board_.tick(); },
                                 base->weights.span(), &base_fingerprint_),
                             base_fingerprint_)));
  if (assignment_.source().kind() == pb::Source::INIT) {
    const engine::StateView to = engine_->begin_state();
    const std::string& from = jobfile::init_path(job_.model());
    if (from.empty() || engine_->base() != nullptr)
      fill_initial_weights(engine_->rank_shard(), job_.train().seed(),
                           backend_->threads(), to.weights);
    else
      RETURN_IF_ERROR(load_initial_weights(
          *fs_, from, engine_->rank_shard(), [this] { board_.tick(); },
          to.weights, &init_fingerprint_));
    // A reused segment still has its old contents.
    for (const std::span<float> v : {to.exp_avg, to.exp_avg_sq})
      if (!v.empty()) backend_->zero(v.data(), v.size_bytes());
  }
  board_.tick();
  prepare_ms_ = monotonic_ms() - began_ms;
  return ok_status();
}

Status Trainer::connect() {
  board_.set_phase(pb::RankStatus::CONNECTING);
  ASSIGN_OR_RETURN(mpi_, comm::MpiWorld::init(
                             {.size = layout_.world(),
                              .rank = spec_.has_rank() ? spec_.rank() : -1}));
  log_.set_rank(mpi_->rank());
  const pb::Parallel& p = job_.parallel();
  const pb::Train& t = job_.train();
  ASSIGN_OR_RETURN(const geometry::ScheduleKind kind,
                   geometry::parse_schedule(p.pipeline_schedule()));
  ASSIGN_OR_RETURN(
      const geometry::Schedule schedule,
      geometry::step_schedule(
          kind, layout_.pp, static_cast<int>(p.pipeline_chunks()),
          geometry::largest_share(t.global_batch_size() / t.local_batch_size(),
                                  shares(), layout_.dp)));
  tracer_ = std::make_unique<trace::Tracer>(
      trace::TracerOptions{.generation = assignment_.generation(),
                           .rank = mpi_->rank(),
                           .mesh = layout_.to_string(),
                           .schedule = p.pipeline_schedule(),
                           .chunks = schedule.chunks,
                           .microbatches = schedule.num_microbatches});
  tracer_->set_flight(&board_.flight());
  world_ = std::make_unique<trace::TracedComm>(mpi_->world(), *tracer_, "world",
                                               trace::mesh_group_names());
  ASSIGN_OR_RETURN(mesh_, comm::Mesh::make(*world_, layout_));
  if (assignment_.measure_link()) {
    std::vector<std::string> hosts;
    for (const memory::RankHost& p : memory::places_of(assignment_))
      hosts.push_back(p.host);
    board_.set_link(measure_link(*world_, hosts));
  }
  log_start("mpi_ms");
  return ok_status();
}

// By parameter; empty without groups.
Result<std::vector<engine::ParamRule>> Trainer::param_rules() {
  const pb::Optimizer& a = job_.optimizer();
  std::vector<engine::ParamRule> out;
  if (a.groups().empty()) return out;
  ASSIGN_OR_RETURN(const auto groups,
                   jobfile::param_groups(a, table_->config()));
  const auto of = jobfile::groups_of(*table_, groups);
  for (size_t i = 0; i < of.size(); ++i) {
    engine::ParamRule rule{.weight_decay =
                               (*table_)[i].decay ? a.weight_decay() : 0};
    if (of[i] != nullptr) {
      rule.lr = of[i]->lr;
      rule.weight_decay = of[i]->weight_decay.value_or(rule.weight_decay);
      rule.frozen = of[i]->frozen;
    }
    out.push_back(rule);
  }
  return out;
}

Result<engine::EngineOptions> Trainer::engine_options() {
  const pb::Train& t = job_.train();
  const pb::Parallel& p = job_.parallel();
  const pb::Optimizer& a = job_.optimizer();
  engine::EngineOptions o;
  ASSIGN_OR_RETURN(o.schedule, geometry::parse_schedule(p.pipeline_schedule()));
  o.zero.stage = static_cast<int>(p.zero_stage());
  o.zero.shard_group = static_cast<int>(p.zero_shard_group());
  o.chunks = static_cast<int>(p.pipeline_chunks());
  ASSIGN_OR_RETURN(o.recompute, geometry::parse_recompute(t.recompute()));
  o.recompute_every = static_cast<int>(t.recompute_every());
  o.dtype = dtype_ = dtype();
  o.num_microbatches = t.global_batch_size() / t.local_batch_size();
  o.shares = shares();
  o.max_batch = t.local_batch_size();
  o.max_seq = t.seq_len();
  o.optimizer = {.beta1 = a.beta1(),
                 .beta2 = a.beta2(),
                 .eps = a.eps(),
                 .weight_decay = a.weight_decay(),
                 .max_norm = t.max_norm()};
  ASSIGN_OR_RETURN(o.optimizer.rules, param_rules());
  o.z_loss = t.z_loss();
  o.bucket_elements = p.bucket_mb() * (int64_t{1} << 18);
  return o;
}

Status Trainer::build(int rank) {
  const geometry::ModelConfig config = jobfile::model_config(job_);
  RETURN_IF_ERROR(config.validate());
  table_.emplace(geometry::ParamTable::make(config));
  flops_per_token_ = geometry::flops_per_token(config, job_.train().seq_len());
  ASSIGN_OR_RETURN(const engine::EngineOptions options, engine_options());
  if (!spec_.state_folder().empty())
    home_ = std::make_unique<StateHome>(*table_, spec_, rank,
                                        [this] { board_.tick(); });
  ASSIGN_OR_RETURN(engine_, engine::Engine::prepare(
                                *table_, layout_, rank, options, *backend_,
                                engine::Progress(&board_), home_.get()));
  if (home_ != nullptr) {
    ASSIGN_OR_RETURN(replication_,
                     Replication::prepare(*table_, spec_, rank, *home_));
  }
  return ok_status();
}

Status Trainer::restore() {
  board_.set_phase(pb::RankStatus::RESTORING);
  RETURN_IF_ERROR(check_inputs());
  RETURN_IF_ERROR(restore_state());
  first_step_ = engine_->step();
  RETURN_IF_ERROR(begin_replicas());
  engine_->state_loaded();
  std::string of_state;
  if (job_.train().digest()) {
    const uint64_t d = digest();
    board_.set_restored_digest(d);
    of_state = fmt::format("{:016x}", d);
  }
  make_checkpointer();
  published_step_ = first_step_;
  update_committed();
  const pb::Source& source = assignment_.source();
  log_.info(
      "restored",
      {{"source", source.kind() == pb::Source::CHECKPOINT ? source.path()
                  : source.kind() == pb::Source::MEMORY ? std::string("memory")
                                                        : std::string("init")},
       {"reason", source.reason()},
       {"from_step", first_step_},
       {"digest", of_state}});
  log_start("restore_ms");
  return ok_status();
}

Status Trainer::restore_state() {
  const auto tick = [this] { board_.tick(); };
  if (engine::FrozenBase* const base = engine_->base())
    exchange_parts(mesh_->data(), base->rank_shard, tick, base->weights.span());
  const pb::Source& source = assignment_.source();
  if (source.kind() == pb::Source::INIT) {
    exchange_parts(mesh_->data(), engine_->rank_shard(), tick,
                   engine_->begin_state().weights);
    engine_->commit_state(0);
    return ok_status();
  }
  if (source.kind() == pb::Source::MEMORY) return restore_memory();
  const pb::Train& t = job_.train();
  const auto m = load_checkpoint(*fs_, source.path(), source.step(),
                                 {.model = table_->config(),
                                  .seed = t.seed(),
                                  .data_id = data_id(),
                                  .global_batch_size = t.global_batch_size(),
                                  .seq_len = t.seq_len(),
                                  .base_fingerprint = base_fingerprint_},
                                 *mesh_, tick, engine_->rank_shard(),
                                 engine_->begin_state());
  if (!m.ok())
    return fail_to_load(m.status().code() == Code::kInvalidArgument
                            ? kExitFailed
                        : is_unreadable(m.status().code()) ? kExitUnreadable
                                                           : kExitBadSource,
                        m.status());
  if (home_ != nullptr) home_->set_position(m->step(), m->tokens());
  engine_->commit_state(m->step());
  first_generation_ = source.has_made_by() ? source.made_by() : m->generation();
  first_tokens_ = m->tokens();
  return ok_status();
}

// All ranks have tried, so those that failed end with the reason. The others
// wait in a collective that these do not join, until their workers end them: a
// rank that ended first would be taken for the cause.
Status Trainer::fail_to_load(ExitCode code, Status status) {
  if (status.code() != Code::kCancelled) return fail(code, std::move(status));
  world_->barrier();
  return fail(kExitWorld, std::move(status));
}

Status Trainer::restore_memory() {
  if (home_ == nullptr)
    return fail(kExitBadSource,
                not_found("the source is a state in shared memory, and this "
                          "worker keeps none"));
  if (Status s = home_->restore(*world_, [this] { board_.tick(); }); !s.ok())
    return fail_to_load(kExitBadSource, std::move(s));
  const MemorySource& from = *home_->source();
  engine_->set_step(from.states().step);
  const pb::Source& source = assignment_.source();
  first_generation_ =
      source.has_made_by() ? source.made_by() : from.states().generation;
  first_tokens_ = from.tokens();
  return ok_status();
}

// Starts replication. Once every rank has committed its initial state, older
// states may be overwritten.
Status Trainer::begin_replicas() {
  if (home_ == nullptr) return ok_status();
  world_->barrier();
  if (Status s = home_->complete(); !s.ok())
    return fail(*home_->exit_code(), std::move(s));
  if (replication_ == nullptr) return ok_status();
  if (Status s = replication_->connect(*world_); !s.ok())
    return home_->exit_code() ? fail(*home_->exit_code(), std::move(s)) : s;
  replication_->start();
  engine_->set_poll([this] { poll_replica(); });
  log_.info("replicas", {{"kept_here", replication_->num_kept()},
                         {"copied_on_this_host", replication_->num_mapped()},
                         {"bytes", replication_->bytes()}});
  return ok_status();
}

void Trainer::make_checkpointer() {
  const pb::Train& t = job_.train();
  pb::Manifest manifest;
  manifest.set_job(job_.job().name());
  manifest.set_generation(assignment_.generation());
  *manifest.mutable_mesh() = assignment_.mesh();
  *manifest.mutable_model() = manifest::model_info(table_->config());
  if (table_->config().lora.rank > 0) {
    manifest.set_base(jobfile::init_path(job_.model()));
    manifest.set_base_fingerprint(base_fingerprint_);
  }
  manifest.set_seed(t.seed());
  manifest.set_data_id(data_id());
  if (assignment_.run_id() != 0) manifest.set_run_id(assignment_.run_id());
  manifest.set_global_batch_size(t.global_batch_size());
  manifest.set_seq_len(t.seq_len());
  manifest.set_code_version(version());
  if (job_.checkpoint().compression() != "none")
    manifest.set_compression(job_.checkpoint().compression());
  const pb::Checkpoint& c = job_.checkpoint();
  checkpointer_ = std::make_unique<Checkpointer>(
      CheckpointerOptions{
          .folder = rundir::checkpoints_path(assignment_.run_dir(), c.folder()),
          .interval = c.interval(),
          .retention = {.keep_latest_k = c.keep_latest_k(),
                        .keep_every_n = c.keep_every_n()},
          .manifest = std::move(manifest),
          .tokens_per_step = t.global_batch_size() * t.seq_len(),
          .sequence_offset = job_.data().sequence_offset(),
          .sequences_per_step = t.global_batch_size(),
          .first_step = first_step_,
          .first_generation = first_generation_,
          .first_tokens = first_tokens_,
          .double_buffered = home_ != nullptr},
      *fs_, engine_->rank_shard(), *backend_, mpi_->world(), board_, log_);
}

}  // namespace remesh::train
