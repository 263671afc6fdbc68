// The making of an Engine: tables, memory, stages, groups, state.
#include "worker/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/geometry/mesh_check.h"
#include "proto/base/check.h"
#include "worker/engine/hooks.h"

namespace remesh::engine {

using geometry::Coord;
using geometry::Layout;
using geometry::ShardTable;
using geometry::ZeroPlan;

namespace {

Status check_sizes(const EngineOptions& o, const Layout& layout) {
  if (o.num_microbatches < 1 || o.max_batch < 1 || o.max_seq < 1 ||
      o.recompute_every < 1)
    return invalid_argument(fmt::format(
        "engine: {} microbatches of {} sequences of {} tokens, recomputed "
        "every {} layers: each must be at least 1",
        o.num_microbatches, o.max_batch, o.max_seq, o.recompute_every));
  return geometry::check_context(o.max_seq, layout.cp);
}

}  // namespace

Engine::Engine(const geometry::ParamTable& table, const EngineOptions& options,
               kernels::Backend& backend, Progress progress, StateStore* state)
    : table_(table),
      options_(options),
      backend_(backend),
      progress_(progress),
      own_state_(state == nullptr ? own_memory(backend) : nullptr),
      state_(state == nullptr ? own_state_.get() : state) {}

Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::prepare(
    const geometry::ParamTable& table, const Layout& layout, int rank,
    const EngineOptions& options, kernels::Backend& backend, Progress progress,
    StateStore* state) {
  RETURN_IF_ERROR(check_sizes(options, layout));
  auto engine = std::unique_ptr<Engine>(
      new Engine(table, options, backend, progress, state));
  RETURN_IF_ERROR(engine->init(layout, rank));
  return engine;
}

Status Engine::init(const Layout& layout, int rank) {
  RETURN_IF_ERROR(geometry::validate_layout(table_.config(), layout));
  ASSIGN_OR_RETURN(schedule_,
                   geometry::step_schedule(
                       options_.schedule, layout.pp, options_.chunks,
                       geometry::largest_share(options_.num_microbatches,
                                               options_.shares, layout.dp)));
  ASSIGN_OR_RETURN(
      const geometry::StageBounds bounds,
      geometry::stage_bounds(table_.config(), layout.pp * options_.chunks,
                             options_.max_seq));
  sharding_ = {.layout = layout,
               .bounds = bounds,
               .chunks = options_.chunks,
               .zero = options_.zero};
  ASSIGN_OR_RETURN(rank_shard_,
                   geometry::make_rank_shard(table_, sharding_, rank));
  if (table_.config().lora.rank > 0) RETURN_IF_ERROR(make_base(rank));
  RETURN_IF_ERROR(make_state());
  return single() ? make_stages() : ok_status();
}

Status Engine::make_base(int rank) {
  base_ = std::make_unique<FrozenBase>();
  base_->table = geometry::ParamTable::make(table_.config().base());
  geometry::Sharding whole = sharding_;
  whole.zero = {};
  ASSIGN_OR_RETURN(base_->rank_shard,
                   geometry::make_rank_shard(base_->table, whole, rank));
  ASSIGN_OR_RETURN(
      base_->weights,
      FlatBuffer::make(backend_, base_->rank_shard.shard.num_elements(),
                       "the frozen model"));
  return ok_status();
}

Status Engine::make_state() {
  RETURN_IF_ERROR(
      state_->reserve(sharding_, rank_shard_.zero.state_elements()));
  ASSIGN_OR_RETURN(
      store_, WeightStore::make(rank_shard_.shard, rank_shard_.zero, backend_,
                                weights(), waited_.gather));
  ASSIGN_OR_RETURN(
      grads_, GradStore::make(rank_shard_.shard, rank_shard_.zero, backend_,
                              schedule_.num_microbatches == 1,
                              options_.bucket_elements, waited_.reduce));
  return ok_status();
}

model::StageOptions Engine::stage_options(int chunk, int slots) const {
  model::StageOptions o{.chunk = chunk,
                        .dtype = options_.dtype,
                        .max_batch = options_.max_batch,
                        .max_seq = options_.max_seq,
                        .num_slots = slots,
                        .split_backward = schedule_.split_backward,
                        .z_loss = options_.z_loss};
  for (int64_t l = rank_shard_.shard.first_layer(chunk);
       l < rank_shard_.shard.last_layer(chunk); ++l)
    o.recompute.push_back(l % options_.recompute_every == 0
                              ? options_.recompute
                              : model::Recompute::kNone);
  if (base_ != nullptr)
    o.base = {&base_->rank_shard.shard, base_->weights.span()};
  if (store_->streams()) o.block_buffers = WeightStore::kBlockBuffers;
  return o;
}

Status Engine::make_stages() {
  const std::vector<int> slots =
      geometry::slots_needed(schedule_, rank_shard_.shard.coord().pp);
  int64_t most = 0;
  for (int c = 0; c < options_.chunks; ++c) {
    model::StageOptions o = stage_options(c, slots[static_cast<size_t>(c)]);
    o.tp = tp_.get();
    o.cp = cp_.get();
    ASSIGN_OR_RETURN(auto stage,
                     model::Stage::create(rank_shard_.shard, o, backend_));
    most = std::max(most,
                    stage->stream_rows(options_.max_batch, options_.max_seq));
    stages_.push_back(std::move(stage));
    free_slots_.emplace_back();
    for (int s = slots[static_cast<size_t>(c)]; s-- > 0;)
      free_slots_.back().push_back(s);
    slot_of_.emplace_back(static_cast<size_t>(schedule_.num_microbatches), -1);
  }
  links_ = std::make_unique<PipeLinks>(backend_, most * table_.config().dim,
                                       waited_.pipeline);
  return ok_status();
}

// Collective; every rank asks for the same groups in the same order.
void Engine::make_groups(comm::Mesh& mesh) {
  const auto keep = [&](std::unique_ptr<comm::Comm> c) {
    if (c == nullptr) return static_cast<comm::Comm*>(nullptr);
    groups_.push_back(std::move(c));
    return groups_.back().get();
  };
  GradGroups groups;
  const int n = rank_shard_.zero.group_size();
  const int z = rank_shard_.zero.shard_size();
  if (z == n && z > 1)
    groups.shard = &mesh.data();
  else if (z > 1)
    groups.shard = keep(mesh.data().split(rank_shard_.zero.replica_index(),
                                          rank_shard_.zero.shard_index()));
  if (z < n)
    groups.replicas =
        z == 1 ? &mesh.data()
               : keep(mesh.data().split(rank_shard_.zero.shard_index(),
                                        rank_shard_.zero.replica_index()));
  // Gathering runs beside the sums, in an order of its own.
  comm::Comm* gather = groups.shard;
  if (store_->streams())
    gather = keep(groups.shard->split(0, groups.shard->rank()));

  const int tp = rank_shard_.shard.layout().tp;
  for (size_t i = 0; i < rank_shard_.shard.size(); ++i) {
    const int g = rank_shard_.shard[i].tp_group;
    if (g == 1 || groups.tp.contains(g)) continue;
    groups.tp[g] =
        g == tp
            ? &mesh.tp()
            : keep(mesh.tp().split(mesh.tp().rank() / g, mesh.tp().rank() % g));
  }
  const int pp = rank_shard_.shard.layout().pp;
  if (table_.config().tie_embeddings && pp > 1) {
    const int at = rank_shard_.shard.coord().pp;
    groups.ends = keep(mesh.pp().split(at == 0 || at == pp - 1 ? 0 : -1, at));
  }
  grads_->connect(groups);
  std::vector<model::Stage*> stages;
  for (const auto& s : stages_) stages.push_back(s.get());
  store_->connect(gather, std::move(stages));
  links_->connect(mesh.pp());
  hooks_ = std::make_unique<Hooks>(*store_, *grads_, *links_, progress_, poll_);
}

Status Engine::connect(comm::Mesh& mesh) {
  CHECK(mesh_ == nullptr);
  CHECK(mesh.layout() == rank_shard_.shard.layout() &&
        mesh.coord() == rank_shard_.shard.coord());
  mesh_ = &mesh;
  if (rank_shard_.shard.layout().tp > 1)
    tp_ = std::make_unique<TimedComm>(mesh.tp(), TimeObserver(waited_.tensor));
  if (rank_shard_.shard.layout().cp > 1)
    cp_ = std::make_unique<TimedComm>(mesh.cp(), TimeObserver(waited_.context));
  if (!single()) RETURN_IF_ERROR(make_stages());
  make_groups(mesh);
  return ok_status();
}

void Engine::state_loaded() {
  CHECK_MSG(mesh_ != nullptr, "connect() comes first");
  store_->set_master(weights());
  for (size_t u = 0; u < rank_shard_.shard.units().size(); ++u)
    store_->updated(u);
  store_->update_done([this] { progress_.tick(); });
}

MemoryUse Engine::memory() const {
  const uint64_t held =
      static_cast<uint64_t>(state_->copies()) * weights().size_bytes();
  MemoryUse m{.weights = held + store_->bytes(),
              .gradients = grads_->bytes(),
              .optimizer = 2 * held};
  if (base_ != nullptr) m.weights += base_->weights.bytes();
  for (const auto& s : stages_) {
    const model::Stage::Memory of_stage = s->memory();
    m.activations += of_stage.activations;
    m.buffers += of_stage.weights + of_stage.buffers;
  }
  if (links_ != nullptr) m.buffers += links_->bytes();
  return m;
}

}  // namespace remesh::engine
