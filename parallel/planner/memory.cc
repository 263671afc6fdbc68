#include "parallel/planner/memory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/family.h"
#include "parallel/geometry/lora.h"
#include "parallel/geometry/schedule.h"
#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/sharding.h"

namespace remesh::planner {
namespace {

using geometry::Coord;
using geometry::Layout;
using geometry::ShardTable;

constexpr int64_t kFp32 = 4;
constexpr int64_t k16Bit = 2;
constexpr int64_t kStreamedBlocks = 2;  // blocks whose weights ZeRO-3 holds
constexpr int64_t kStateVectors = 3;    // weights and both moments
// Buffers of a streamed file, which keep the disk busy (proto/base).
constexpr uint64_t kFileBuffers = uint64_t{32} << 20;

// Bytes of an element.
struct StateBytes {
  double master = kFp32;  // fp32 weights, sharded
  double moments = 2 * kFp32;
  double copies = 1;         // of master weights and moments
  double computed = k16Bit;  // weights to compute with; 0: the master weights
  double gradient = kFp32;
};
// Elements of a rank that exist at once.
struct StateElements {
  double share = 0;  // of what ZeRO shards
  double computed = 0, gradients = 0;
};

MemoryUse state_memory(const StateBytes& bytes, const StateElements& n) {
  const auto whole = [](double x) { return static_cast<uint64_t>(x); };
  return {.weights = whole(bytes.copies * bytes.master * n.share +
                           bytes.computed * n.computed),
          .gradients = whole(bytes.gradient * n.gradients),
          .optimizer = whole(bytes.copies * bytes.moments * n.share)};
}

// What all ranks of a mesh have in common.
struct Common {
  geometry::ParamTable table;
  std::optional<geometry::ParamTable> base;  // of adapters, frozen
  geometry::Sharding sharding;
  geometry::Schedule schedule;
};
// Of a long step, the schedule of a shorter one: from three microbatches a
// stage on, ranks hold no more at once, but for gpipe, which holds all.
Common common(const JobShape& s, const Layout& l) {
  geometry::Sharding sharding{.layout = l, .chunks = chunks_on(s, l)};
  auto bounds = geometry::stage_bounds(s.model, l.pp * sharding.chunks, s.T);
  CHECK(bounds.ok());
  sharding.bounds = std::move(bounds).value();
  sharding.zero = {.stage = s.zero_stage,
                   .shard_group = s.zero_stage == 0 ? 0 : shard_group_on(s, l)};
  Common out{.table = geometry::ParamTable::make(s.model),
             .base = {},
             .sharding = std::move(sharding),
             .schedule = schedule_on(
                 s, l, std::min(most_microbatches(s, l), int64_t{3} * l.pp))};
  if (s.model.lora.rank > 0)
    out.base = geometry::ParamTable::make(s.model.base());
  return out;
}

// The shard refers to the table.
geometry::RankShard rank_shard(const Common& mesh, int rank) {
  auto made = geometry::make_rank_shard(mesh.table, mesh.sharding, rank);
  CHECK(made.ok());
  return std::move(made).value();
}

// What a rank has beside its adapters: the frozen model, and of the matrices
// with adapters all in fp32, or one layer's in bf16; a copy of the adapters; a
// layer's gradient.
struct FrozenMemory {
  geometry::RankShard rank;
  int64_t weights = 0, buffers = 0;
};
FrozenMemory frozen_memory(const JobShape& s, const Common& mesh,
                           const ShardTable& adapters, int rank) {
  geometry::Sharding whole = mesh.sharding;
  whole.zero = {};
  auto made = geometry::make_rank_shard(*mesh.base, whole, rank);
  CHECK(made.ok());
  FrozenMemory out{.rank = std::move(made).value()};
  const ShardTable& base = out.rank.shard;
  out.weights = base.num_elements() * kFp32;
  const geometry::Lora& lora = s.model.lora;
  for (int c = 0; c < base.chunks(); ++c) {
    int64_t layer = 0, rows = 0, block = 0, copies = 0;
    for (const geometry::Unit& u : base.units()) {
      if (u.kind != geometry::UnitKind::kBlock || u.chunk != c) continue;
      layer = 0;
      for (size_t i = u.first; i < u.last; ++i) {
        if (!has_adapter(base.spec(i), lora)) continue;
        layer += base[i].numel();
        rows = std::max(rows, base[i].rect.rows);
      }
      block = std::max(block, u.numel());
      copies += s.bf16 ? 0 : layer;
    }
    out.buffers +=
        (copies + (s.bf16 ? layer : 0) + block + rows * lora.rank) * kFp32;
  }
  out.buffers += adapters.num_elements() * kFp32;
  return out;
}

geometry::ChunkUse chunk_use(const JobShape& s, const ShardTable& shard, int c,
                             bool split_backward, bool streams) {
  geometry::ChunkUse use{.max_batch = s.B,
                         .max_seq = s.T,
                         .bf16 = s.bf16,
                         .packed = s.packed,
                         .split_backward = split_backward,
                         .block_buffers = streams ? kStreamedBlocks : 0};
  for (int64_t l = shard.first_layer(c); l < shard.last_layer(c); ++l)
    use.recompute.push_back(
        l % s.recompute_every == 0 ? s.recompute : geometry::Recompute::kNone);
  return use;
}

// Messages held: three received ones (one being read, two in transit), and a
// copy of what is sent back.
int64_t message_bytes(const JobShape& s, const Layout& l, const Coord& at,
                      uint64_t message, int64_t passes) {
  if (l.pp == 1) return 0;
  const bool ring = chunks_on(s, l) > 1;
  const bool first = at.pp == 0 && !ring;
  const bool last = at.pp == l.pp - 1 && !ring;
  const int64_t received = (first || last ? 1 : 2) * passes;
  return (std::min<int64_t>(3, received) + (first ? 0 : 1)) *
         static_cast<int64_t>(message);
}

// Elements of all units, each padded to equal shares.
int64_t padded_elements(const ShardTable& shard, int z, bool blocks_only) {
  int64_t sum = 0;
  for (const geometry::Unit& u : shard.units())
    if (!blocks_only || u.kind == geometry::UnitKind::kBlock)
      sum += geometry::share_length(u.numel(), z) * z;
  return sum;
}

// Bytes that a layer keeps of a microbatch, Korthikanti et al. 2022, section 4,
// for any widths: of each element of the stream 2 for each norm's input and
// output, and 1 for each of two dropout masks (not in Llama); 2 for each
// operand of the other products; 5 for each score unless attention is fused.
// With fused attention selective recomputation keeps the layer's input,
// attention's output and every second product (TorchTitan's selective
// checkpointing).
double layer_activations(const JobShape& s, const Layout& l,
                         const Execution& run, geometry::Recompute recompute) {
  const double N = as_double(s.B) * as_double(s.T) / l.cp, tp = l.tp;
  const double D = as_double(s.model.dim), F = as_double(s.model.hidden_dim);
  const double stream = run.sequence_parallel ? N / tp : N;
  const double q = as_double(s.model.q_dim());
  const double kv = as_double(s.model.kv_dim());
  if (recompute == geometry::Recompute::kFull) return 2 * stream * D;
  if (recompute == geometry::Recompute::kSelective && run.fused_attention)
    return 4 * stream * D + N / tp * (4 * q + 2 * kv + 2 * F);
  const bool gpt = s.model.arch == "gpt";
  double bytes = (gpt ? 10 : 8) * stream * D +
                 N / tp * (4 * q + 4 * kv + (gpt ? 4 : 6) * F);
  if (!run.fused_attention && recompute == geometry::Recompute::kNone)
    bytes += 5 * N * as_double(s.T) * as_double(s.model.n_heads) / tp;
  return bytes;
}

// Microbatches in flight on a pipeline rank, in units of all its chunks:
// Narayanan et al. 2021, section 2.2.
double in_flight(const JobShape& s, const Layout& l, int pp_rank) {
  const geometry::ScheduleKind kind = schedule_kind_on(s, l);
  const double m = as_double(most_microbatches(s, l));
  if (kind == geometry::ScheduleKind::kGpipe) return m;
  // With split backwards a rank delays its weight gradients by as many
  // microbatches as ranks precede it, and keeps what they need.
  const double v = chunks_on(s, l);
  const double left =
      geometry::traits_of(kind).split_backward ? l.pp : l.pp - pp_rank;
  return std::min(m, v == 1 ? left : (2 * left - 1 + (v - 1) * l.pp) / v);
}

// Replicas of other ranks' states in shared memory, each double-buffered.
int64_t replica_bytes(const JobShape& s, const Layout& l, int64_t state) {
  const int64_t kept = replicas_kept(s, l);
  const bool own_too = kept > 0 && s.replicate_every > 1;
  return (kept + (own_too ? 1 : 0)) * 2 * kStateVectors * state * kFp32;
}

// Of sums over so many ranks, eight at once (worker/engine/grad_store.cc), each
// with two blocks in progress, which have a piece of every rank
// (parallel/comm/direct_reduce.h). It is never more than twice what is summed.
int64_t sum_scratch(int64_t ranks) {
  constexpr int64_t kAtOnce = 8, kBlocks = 2, kBlock = 2 << 20;
  constexpr int64_t kLeast = 16 << 10, kMost = 256 << 10;
  return ranks == 1 ? 0
                    : kAtOnce * kBlocks * ranks *
                          std::clamp(kBlock / ranks, kLeast, kMost);
}

MemoryUse rank_memory(const JobShape& s, const Layout& l, const Common& mesh,
                      int rank) {
  const Coord at = l.coord(rank);
  const int chunks = chunks_on(s, l);
  const auto [shard, zero] = rank_shard(mesh, rank);
  std::optional<FrozenMemory> frozen;
  if (mesh.base) frozen = frozen_memory(s, mesh, shard, rank);
  const ShardTable& computed = frozen ? frozen->rank.shard : shard;
  const int z = shard_group_on(s, l);
  const bool streams = s.zero_stage == 3 && z > 1;
  const geometry::Schedule& schedule = mesh.schedule;
  const bool few_gradients =
      s.zero_stage >= 2 && z > 1 && schedule.num_microbatches == 1;
  const int64_t state = zero.state_elements();

  int64_t largest_block = 0, num_blocks = 0, shares = 0;
  for (const geometry::Unit& u : shard.units()) {
    shares += geometry::share_length(u.numel(), z);
    if (u.kind != geometry::UnitKind::kBlock) continue;
    ++num_blocks;
    largest_block =
        std::max(largest_block, geometry::share_length(u.numel(), z) * z);
  }
  const int64_t padded = padded_elements(shard, z, false);
  const int64_t ends = padded - padded_elements(shard, z, true);
  const int64_t places = std::min<int64_t>(2, num_blocks) * largest_block;

  int64_t gathered = streams ? ends : z > 1 ? padded : 0;
  int64_t activations = 0;
  int64_t buffers = replica_bytes(s, l, state);
  const std::vector<int> live = geometry::slots_needed(schedule, at.pp);
  const bool holds_all = schedule.kind == geometry::ScheduleKind::kGpipe;
  for (int c = 0; c < chunks; ++c) {
    const geometry::ChunkMemory chunk = geometry::chunk_memory(
        computed, c,
        chunk_use(s, computed, c, schedule.split_backward, streams));
    if (streams)
      gathered += std::min(kStreamedBlocks,
                           shard.last_layer(c) - shard.first_layer(c)) *
                  largest_block;
    activations +=
        (holds_all ? most_microbatches(s, l) : live[static_cast<size_t>(c)]) *
        static_cast<int64_t>(chunk.activations);
    buffers += static_cast<int64_t>(chunk.buffers + chunk.weights);
    if (c == 0)
      buffers +=
          message_bytes(s, l, at, chunk.message, schedule.num_microbatches);
  }
  MemoryUse m = state_memory(
      {.copies = s.keep_state ? 2.0 : 1.0, .computed = kFp32},
      {.share = as_double(state),
       .computed = as_double(gathered),
       .gradients =
           as_double(few_gradients ? shares + places + ends : padded)});
  m.activations = static_cast<uint64_t>(activations);
  m.buffers = static_cast<uint64_t>(buffers);
  if (frozen) {
    m.weights += static_cast<uint64_t>(frozen->weights);
    m.buffers += static_cast<uint64_t>(frozen->buffers);
  }
  return m;
}

}  // namespace

int64_t replicas_kept(const JobShape& s, const Layout& l) {
  if (!s.keep_state || s.replicate_every < 1) return 0;
  const int64_t world = l.world();
  const int64_t states = int64_t{l.pp} * l.tp * shard_group_on(s, l);
  const int64_t copies = world / states;
  const int64_t missing =
      std::clamp<int64_t>(s.replicas + 1 - copies, 0, world - copies);
  return (states * missing + world - 1) / world;
}

MemoryUse predict_memory(const JobShape& s, const Layout& l, int rank) {
  return rank_memory(s, l, common(s, l), rank);
}

MemoryUse predict_memory(const JobShape& s, const Layout& l, int pp_rank,
                         const Execution& run, const Parts& parts) {
  const bool first = pp_rank == 0, last = pp_rank == l.pp - 1;
  const int v = chunks_on(s, l);
  double layers = 0;
  for (int i = pp_rank; i < l.pp * v; i += l.pp)
    layers +=
        as_double(geometry::even_share(s.model.n_layers, l.pp * v, i).size());
  const bool tied = l.pp == 1 && s.model.tie_embeddings;
  const double tables =
      parts.vocabulary_elements * (first + last - (tied ? 1 : 0));
  const double all = layers * parts.layer_elements + tables;
  const int z = shard_group_on(s, l);
  const bool sharded = s.zero_stage >= 2 && z > 1 && l.pp == 1;
  const double few = parts.layer_elements + tables;
  MemoryUse m =
      state_memory({.gradient = run.gradient_bytes},
                   {.share = all / z,
                    .computed = sharded && s.zero_stage == 3
                                    ? std::min(all, few + parts.layer_elements)
                                    : all,
                    .gradients = sharded ? std::min(all, all / z + few) : all});

  double activations = in_flight(s, l, pp_rank) * layers *
                       layer_activations(s, l, run, s.recompute);
  double buffers = 0;
  const double N = as_double(s.B) * as_double(s.T) / l.cp;
  if (s.recompute != geometry::Recompute::kNone)
    buffers += layer_activations(s, l, run, geometry::Recompute::kNone) -
               layer_activations(s, l, run, s.recompute);
  if (last) {
    const double logits = N * as_double(s.model.vocab_size) / l.tp;
    const double stream = N / (run.sequence_parallel ? l.tp : 1);
    activations += 4 * (stream * as_double(s.model.dim) + logits);
    buffers += k16Bit * logits;
  }
  m.activations = static_cast<uint64_t>(activations);
  m.buffers = static_cast<uint64_t>(buffers);
  return m;
}

uint64_t predict_save(const JobShape& s, const Layout& l, int rank) {
  const Common mesh = common(s, l);
  int64_t elements = 0;
  for (const geometry::Piece& p :
       geometry::pieces_to_save(rank_shard(mesh, rank)))
    elements += p.rect.numel();
  const auto bytes = static_cast<uint64_t>(elements * kStateVectors * kFp32);
  return bytes + (s.keep_state ? 0 : std::min(bytes, kFileBuffers));
}

uint64_t predict_segments(const JobShape& s, const Layout& l, int rank) {
  if (!s.keep_state) return 0;
  const Common mesh = common(s, l);
  const int64_t state = rank_shard(mesh, rank).zero.state_elements();
  return static_cast<uint64_t>(2 * kStateVectors * state * kFp32 +
                               replica_bytes(s, l, state));
}

uint64_t predict_workspace(const JobShape& s, const Layout& l, int threads) {
  const int64_t gradients =
      geometry::ParamTable::make(s.model).num_elements() / l.tp / l.pp * kFp32;
  const int z = shard_group_on(s, l);
  const int64_t sums =
      std::min(2 * gradients, sum_scratch(z) + sum_scratch(l.dp * l.cp / z));
  const int64_t tokens = s.B * s.T / l.cp;
  const int64_t width = std::max(s.model.dim, s.model.hidden_dim / l.tp);
  const int64_t columns = s.bf16 && s.packed ? k16Bit * tokens * width : 0;
  // Six fp32 vectors of a head's sequence; bf16 with AMX needs fewer bytes.
  constexpr int64_t kVectors = 6 * kFp32;
  return static_cast<uint64_t>(sums + columns +
                               threads * kVectors * s.T * s.model.head_dim());
}

MemoryUse predict_worst_memory(const JobShape& s, const Layout& l) {
  MemoryUse worst;
  // Among data- and context-parallel ranks the first needs most, and among
  // tensor-parallel ranks the first has most rows.
  const Common mesh = common(s, l);
  for (int pp = 0; pp < l.pp; ++pp) {
    const MemoryUse m = rank_memory(s, l, mesh, l.rank({.pp = pp}));
    if (m.total() > worst.total()) worst = m;
  }
  return worst;
}

// The ranks of a copy of the model hold all of it together, and the one with
// most has at least the mean.
uint64_t least_memory(const JobShape& s, const Layout& l, int64_t parameters) {
  const double mean = as_double(parameters) / (l.pp * l.tp);
  const double z = shard_group_on(s, l);
  const bool few = s.zero_stage >= 2 && z > 1 && most_microbatches(s, l) == 1;
  const double held = s.keep_state ? 2 : 1;
  return static_cast<uint64_t>(mean * kFp32 *
                               (held * kStateVectors / z + (few ? 1 / z : 1)));
}

MemoryUse predict_worst_memory(const JobShape& s, const Layout& l,
                               const Execution& run, const Parts& parts) {
  const MemoryUse first = predict_memory(s, l, 0, run, parts);
  if (l.pp == 1) return first;
  const MemoryUse last = predict_memory(s, l, l.pp - 1, run, parts);
  return last.total() > first.total() ? last : first;
}

}  // namespace remesh::planner
