#include "parallel/planner/memory.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
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

// The parameters of a job, and of adapters the frozen model's.
struct Tables {
  explicit Tables(const JobShape& s)
      : trained(geometry::ParamTable::make(s.model)) {
    if (s.model.lora.rank > 0)
      frozen = geometry::ParamTable::make(s.model.base());
  }
  geometry::ParamTable trained;
  std::optional<geometry::ParamTable> frozen;
};

geometry::StageBounds stage_bounds_on(const JobShape& s, const Layout& l) {
  auto bounds = geometry::stage_bounds(s.model, l.pp * chunks_on(s, l), s.T);
  CHECK(bounds.ok());
  return std::move(bounds).value();
}

// Of a long step, the schedule of a shorter one: from three microbatches a
// stage on, ranks hold no more at once, but for gpipe, which holds all.
int64_t shortened_step(const JobShape& s, const Layout& l) {
  const int64_t n = std::min(most_microbatches(s, l), int64_t{3} * l.pp);
  // An interleaved one is padded (geometry::step_schedule()).
  return chunks_on(s, l) > 1 ? (n + l.pp - 1) / l.pp * l.pp : n;
}

// What of the model a rank has, whatever ZeRO and the number of microbatches
// make of it.
struct Holdings {
  struct Units {
    bool blocks = false;
    int64_t numel = 0;  // of each
    int64_t count = 0;
  };
  struct Chunk {
    int64_t layers = 0;
    geometry::ChunkMemory memory;
  };
  std::vector<Units> units;
  std::vector<Chunk> chunks;
  int64_t frozen_weights = 0, frozen_buffers = 0;
};

// What a rank has beside its adapters: the frozen model, and of the matrices
// with adapters all in fp32, or one layer's in bf16; a copy of the adapters; a
// layer's gradient.
void add_frozen(const JobShape& s, const ShardTable& base,
                const ShardTable& adapters, Holdings* out) {
  out->frozen_weights = base.num_elements() * kFp32;
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
    out->frozen_buffers +=
        (copies + (s.bf16 ? layer : 0) + block + rows * lora.rank) * kFp32;
  }
  out->frozen_buffers += adapters.num_elements() * kFp32;
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

// Whether weights are gathered block by block (ZeRO 3).
bool streams_on(const JobShape& s, const Layout& l) {
  return s.zero_stage == 3 && shard_group_on(s, l) > 1;
}

bool splits_backward(const JobShape& s, const Layout& l) {
  return geometry::traits_of(schedule_kind_on(s, l)).split_backward;
}

Holdings holdings_of(const JobShape& s, const Layout& l, const Tables& tables,
                     const geometry::StageBounds& bounds, const Coord& at) {
  const auto shard_of = [&](const geometry::ParamTable& table) {
    auto made = ShardTable::make(table, l, at, bounds, chunks_on(s, l));
    CHECK(made.ok());
    return std::move(made).value();
  };
  const ShardTable shard = shard_of(tables.trained);
  std::optional<ShardTable> base;
  if (tables.frozen) base = shard_of(*tables.frozen);
  Holdings out;
  for (const geometry::Unit& u : shard.units()) {
    const bool block = u.kind == geometry::UnitKind::kBlock;
    const auto same = std::ranges::find_if(out.units, [&](const auto& o) {
      return o.blocks == block && o.numel == u.numel();
    });
    if (same != out.units.end())
      ++same->count;
    else
      out.units.push_back({block, u.numel(), 1});
  }
  for (int c = 0; c < shard.chunks(); ++c) {
    const ShardTable& computed = base ? *base : shard;
    out.chunks.push_back({.layers = shard.last_layer(c) - shard.first_layer(c),
                          .memory = geometry::chunk_memory(
                              computed, c,
                              chunk_use(s, computed, c, splits_backward(s, l),
                                        streams_on(s, l)))});
  }
  if (base) add_frozen(s, *base, shard, &out);
  return out;
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

// Elements of the state of the rank with this index among those that hold the
// same of the model (geometry/zero.h).
int64_t state_elements(const JobShape& s, const Layout& l, const Holdings& held,
                       int index) {
  const int z = shard_group_on(s, l);
  int64_t sum = 0;
  for (const Holdings::Units& u : held.units)
    sum += u.count * geometry::share_of(u.numel, z, index % z).size();
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

// live: microbatches at once of each chunk (geometry::slots_needed()).
MemoryUse rank_memory(const JobShape& s, const Layout& l, const Coord& at,
                      const Holdings& held, const std::vector<int>& live) {
  const int z = shard_group_on(s, l);
  const bool streams = streams_on(s, l);
  const int64_t passes = shortened_step(s, l);
  const bool few_gradients = s.zero_stage >= 2 && z > 1 && passes == 1;
  const int64_t state = state_elements(s, l, held, at.dp * l.cp + at.cp);

  // Elements of all units, each padded to equal shares.
  int64_t largest_block = 0, num_blocks = 0, shares = 0, padded = 0, ends = 0;
  for (const Holdings::Units& u : held.units) {
    const int64_t share = geometry::share_length(u.numel, z);
    shares += u.count * share;
    padded += u.count * share * z;
    if (!u.blocks) {
      ends += u.count * share * z;
      continue;
    }
    num_blocks += u.count;
    largest_block = std::max(largest_block, share * z);
  }
  const int64_t places = std::min<int64_t>(2, num_blocks) * largest_block;

  int64_t gathered = streams ? ends : z > 1 ? padded : 0;
  int64_t activations = 0;
  int64_t buffers = replica_bytes(s, l, state);
  const bool holds_all =
      schedule_kind_on(s, l) == geometry::ScheduleKind::kGpipe;
  for (size_t c = 0; c < held.chunks.size(); ++c) {
    const auto& [layers, chunk] = held.chunks[c];
    if (streams) gathered += std::min(kStreamedBlocks, layers) * largest_block;
    activations += (holds_all ? most_microbatches(s, l) : live[c]) *
                   static_cast<int64_t>(chunk.activations);
    buffers += static_cast<int64_t>(chunk.buffers + chunk.weights);
    if (c == 0) buffers += message_bytes(s, l, at, chunk.message, passes);
  }
  MemoryUse m = state_memory(
      {.copies = s.keep_state ? 2.0 : 1.0, .computed = kFp32},
      {.share = as_double(state),
       .computed = as_double(gathered),
       .gradients =
           as_double(few_gradients ? shares + places + ends : padded)});
  m.activations = static_cast<uint64_t>(activations);
  m.buffers = static_cast<uint64_t>(buffers);
  m.weights += static_cast<uint64_t>(held.frozen_weights);
  m.buffers += static_cast<uint64_t>(held.frozen_buffers);
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
  const Coord at = l.coord(rank);
  return rank_memory(
      s, l, at, holdings_of(s, l, Tables(s), stage_bounds_on(s, l), at),
      geometry::slots_needed(schedule_on(s, l, shortened_step(s, l)), at.pp));
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
  const auto table = geometry::ParamTable::make(s.model);
  const auto shard = geometry::make_rank_shard(
      table,
      {.layout = l,
       .bounds = stage_bounds_on(s, l),
       .chunks = chunks_on(s, l),
       .zero = {.stage = s.zero_stage,
                .shard_group = s.zero_stage == 0 ? 0 : shard_group_on(s, l)}},
      rank);
  CHECK(shard.ok());
  int64_t elements = 0;
  for (const geometry::Piece& p : geometry::pieces_to_save(*shard))
    elements += p.rect.numel();
  const auto bytes = static_cast<uint64_t>(elements * kStateVectors * kFp32);
  return bytes + (s.keep_state ? 0 : std::min(bytes, kFileBuffers));
}

uint64_t predict_segments(const JobShape& s, const Layout& l, int rank) {
  if (!s.keep_state) return 0;
  const Coord at = l.coord(rank);
  const int64_t state = state_elements(
      s, l, holdings_of(s, l, Tables(s), stage_bounds_on(s, l), at),
      at.dp * l.cp + at.cp);
  return static_cast<uint64_t>(2 * kStateVectors * state * kFp32 +
                               replica_bytes(s, l, state));
}

struct MemoryPredictor::Known {
  // Of each chunk of a stage its layers, how they are recomputed, and which
  // ends of the model it has.
  struct Chunk {
    int64_t layers = 0, first = 0;
    bool embedding = false, head = false;
    auto operator<=>(const Chunk&) const = default;
  };
  struct Stage {
    int tp = 1, cp = 1;
    bool streams = false, split = false;
    std::vector<Chunk> chunks;
    auto operator<=>(const Stage&) const = default;
  };
  explicit Known(const JobShape& s) : tables(s) {}

  // slots_needed() of each pipeline rank.
  const std::vector<std::vector<int>>& live_on(const JobShape& s,
                                               const Layout& l) {
    const geometry::ScheduleKind kind = schedule_kind_on(s, l);
    int64_t passes = shortened_step(s, l);
    if (kind == geometry::ScheduleKind::k1F1B)
      passes = std::min<int64_t>(passes, l.pp);
    auto& out = live[{kind, l.pp, chunks_on(s, l), passes}];
    if (!out.empty()) return out;
    const auto schedule = schedule_on(s, l, passes);
    for (int pp = 0; pp < l.pp; ++pp)
      out.push_back(geometry::slots_needed(schedule, pp));
    return out;
  }

  Tables tables;
  std::map<int, geometry::StageBounds> bounds;  // by stages
  std::map<Stage, Holdings> stages;
  // By schedule, stages of a rank, microbatches and pipeline rank.
  std::map<std::tuple<geometry::ScheduleKind, int, int, int64_t>,
           std::vector<std::vector<int>>>
      live;
};

MemoryPredictor::MemoryPredictor(JobShape shape) : shape_(std::move(shape)) {}
MemoryPredictor::~MemoryPredictor() = default;

MemoryUse MemoryPredictor::worst(const Layout& l) {
  const JobShape& s = shape_;
  if (!known_) known_ = std::make_unique<Known>(s);
  const int chunks = chunks_on(s, l), stages = l.pp * chunks;
  auto [bounds, new_bounds] = known_->bounds.try_emplace(stages);
  if (new_bounds) bounds->second = stage_bounds_on(s, l);
  const std::vector<std::vector<int>>& live = known_->live_on(s, l);
  MemoryUse worst;
  // Among data- and context-parallel ranks the first needs most, and among
  // tensor-parallel ranks the first has most rows.
  for (int pp = 0; pp < l.pp; ++pp) {
    Known::Stage stage{.tp = l.tp,
                       .cp = l.cp,
                       .streams = streams_on(s, l),
                       .split = splits_backward(s, l),
                       .chunks = {}};
    for (int i = pp; i < stages; i += l.pp) {
      const int64_t first = bounds->second[static_cast<size_t>(i)];
      stage.chunks.push_back(
          {.layers = bounds->second[static_cast<size_t>(i) + 1] - first,
           .first = first % s.recompute_every,
           .embedding = i == 0,
           .head = i == stages - 1});
    }
    const auto [held, is_new] = known_->stages.try_emplace(std::move(stage));
    const Coord at{.pp = pp};
    if (is_new)
      held->second = holdings_of(s, l, known_->tables, bounds->second, at);
    const MemoryUse m =
        rank_memory(s, l, at, held->second, live[static_cast<size_t>(pp)]);
    if (m.total() > worst.total()) worst = m;
  }
  return worst;
}

MemoryUse predict_worst_memory(const JobShape& s, const Layout& l) {
  return MemoryPredictor(s).worst(l);
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
