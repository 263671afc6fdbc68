#include "parallel/planner/memory.h"

#include <algorithm>
#include <array>
#include <vector>

#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/zero.h"

namespace remesh::planner {
namespace {

using geometry::Coord;
using geometry::Layout;
using geometry::Role;
using geometry::ShardTable;

constexpr int64_t kFp32 = 4;
constexpr int64_t kHeadPiece = 4096;    // logits worked on at a time
constexpr int64_t kStreamedBlocks = 2;  // blocks whose weights ZeRO-3 holds

// What a model chunk of a rank consists of, in elements.
struct Chunk {
  int64_t layers = 0;
  bool embedding = false, head = false;
  int64_t D = 0, q = 0, kv = 0, F = 0, V = 0, heads = 0, half_head = 0;
  // Rows: of the microbatch, of the stream here, of the stream gathered.
  int64_t N = 0, n = 0, P = 0;
  int64_t d = kFp32;  // bytes of the products' type
  bool split = false;
};

int64_t rows_of(const ShardTable& shard, Role role, int64_t layer) {
  const int i = shard.find(role, layer);
  return i < 0 ? 0 : shard[static_cast<size_t>(i)].rows();
}

Chunk chunk_of(const JobShape& s, const ShardTable& shard, int c) {
  const int64_t layer = shard.first_layer(c);
  Chunk k;
  k.layers = shard.last_layer(c) - layer;
  k.embedding = shard.has_embedding(c);
  k.head = shard.has_head(c);
  k.D = s.model.dim;
  k.q = rows_of(shard, Role::kQuery, layer);
  k.kv = rows_of(shard, Role::kKey, layer);
  k.F = rows_of(shard, Role::kGate, layer);
  k.heads = k.q / s.model.head_dim();
  k.half_head = s.model.head_dim() / 2;
  if (k.head)
    k.V = rows_of(shard,
                  s.model.tie_embeddings ? Role::kEmbedding : Role::kHead, -1);
  const int tp = shard.layout().tp;
  k.N = s.B * (s.T / shard.layout().cp);
  k.n = (k.N + tp - 1) / tp;
  k.P = k.n * tp;
  k.d = s.bf16 ? 2 : kFp32;
  k.split =
      schedule_kind_on(s, shard.layout()) == geometry::ScheduleKind::kZbH1;
  return k;
}

// A layer's activations, kept from forward to backward.
int64_t layer_bytes(const Chunk& k, Recompute r) {
  // What a split backward keeps for the weights' gradients need not be
  // computed again.
  if (k.split && r == Recompute::kSelective) r = Recompute::kNone;
  int64_t bytes = k.n * k.D * kFp32;  // x
  const int64_t norms = 2 * k.P * k.D * k.d;
  const int64_t attention = k.N * k.q * k.d;
  const int64_t gate_up = k.N * 2 * k.F * k.d;
  const int64_t qkv = k.N * (k.q + 2 * k.kv) * k.d;
  if (r != Recompute::kFull)
    bytes += norms + qkv + k.n * k.D * kFp32 + 2 * k.n * kFp32;  // x1, rstd
  if (r == Recompute::kNone)
    bytes += attention + gate_up + k.N * k.heads * kFp32;
  if (k.split) {
    if (r == Recompute::kFull) bytes += norms + attention + gate_up;
    // swiglu, gradients of the layer's output and middle, of q, k, v, norms
    bytes += k.N * k.F * k.d + 2 * k.P * k.D * k.d + qkv + 2 * k.D * kFp32;
  }
  return bytes;
}

Recompute of_layer(const JobShape& s, int64_t layer) {
  return layer % s.recompute_every == 0 ? s.recompute : Recompute::kNone;
}

// One microbatch in a chunk.
int64_t slot_bytes(const JobShape& s, const Chunk& k, int64_t first_layer) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < k.layers; ++i)
    bytes += layer_bytes(k, of_layer(s, first_layer + i));
  if (k.head) {
    bytes += k.n * k.D * kFp32 + k.P * k.D * k.d + k.n * kFp32 + 2 * k.N * 4;
    const Recompute last = of_layer(s, first_layer + k.layers - 1);
    const bool all =
        last == Recompute::kNone || (k.split && last == Recompute::kSelective);
    if (s.bf16 && all) bytes += k.N * k.V * k.d;  // logits
    if (k.split) bytes += k.D * kFp32;
  } else {
    bytes += k.n * k.D * kFp32;  // output
  }
  if (k.embedding) {
    bytes += k.N * 4;
    if (k.split) bytes += k.n * k.D * kFp32;
  }
  return bytes;
}

// What lives inside a call, of one chunk: one layer's parts that no slot keeps,
// where possible in memory that only backward would use.
int64_t scratch_bytes(const JobShape& s, const Chunk& k, int64_t first_layer,
                      const Layout& l) {
  bool some = false;   // layers that compute attention and SwiGLU again
  bool whole = false;  // layers that compute everything again
  for (int64_t i = 0; i < k.layers; ++i) {
    const Recompute r = of_layer(s, first_layer + i);
    some |= r != Recompute::kNone && !k.split;
    whole |= r == Recompute::kFull;
  }
  const int64_t stream = k.n * k.D * kFp32;
  const int64_t normed = k.P * k.D * k.d;
  const int64_t qkv = k.N * (k.q + 2 * k.kv) * k.d;
  int64_t bytes = k.P * k.D * kFp32;  // a product into the stream
  if (l.tp > 1) bytes += stream;
  if (s.bf16 || k.split) bytes += stream;  // its gradient
  if (!k.split) bytes += normed + qkv + k.D * kFp32;
  bytes += normed + k.n * kFp32 + k.N * k.heads * kFp32 +
           k.N * 3 * k.F * k.d;            // norm, lse, gate and up, swiglu
  if (whole && !k.split) bytes += normed;  // the second norm
  if (whole) bytes += k.n * kFp32 + stream + qkv;  // x1
  if (!whole && k.split) bytes += qkv;
  bytes += k.N * k.q * k.d;  // gradient of attention's output
  if (some) bytes += k.N * k.q * k.d + k.N * k.F * k.d;
  bytes += stream;  // of a validation
  if (k.embedding) bytes += k.N * 4;
  if (k.head) {
    bytes += k.N * std::min(kHeadPiece, k.V) * k.d + 5 * k.N * 4;
    if (l.tp > 1) bytes += k.N * 4;
  }
  if (l.cp > 1)
    bytes += k.N * k.q * kFp32 + 2 * k.N * 2 * k.kv * k.d +
             2 * 3 * k.N * k.kv * kFp32;
  bytes += 2 * s.T * k.half_head * kFp32;
  if (l.cp > 1) bytes += 2 * (s.T / l.cp) * k.half_head * kFp32;
  return bytes;
}

// bf16 copies of the weights that products run with.
int64_t copies_bytes(const JobShape& s, const Chunk& k, bool streams) {
  if (!s.bf16) return 0;
  const auto matrix = [&](int64_t rows, int64_t columns) {
    const auto up = [](int64_t n) { return (n + 31) / 32 * 32; };
    return s.packed ? 2 * up(rows) * up(columns) : rows * columns;
  };
  const int64_t sets = streams ? std::min(kStreamedBlocks, k.layers) : k.layers;
  const int64_t block = matrix(k.q + 2 * k.kv, k.D) + matrix(k.D, k.q) +
                        matrix(2 * k.F, k.D) + matrix(k.D, k.F);
  return (sets * block + (k.head ? matrix(k.V, k.D) : 0)) * k.d;
}

// Most microbatches of each chunk alive at once on a pipeline rank.
std::vector<int64_t> live_slots(const geometry::Schedule& schedule, int rank) {
  const auto chunks = static_cast<size_t>(schedule.chunks);
  std::vector<int64_t> most(chunks, 1), live(chunks, 0);
  const auto last = schedule.split_backward ? geometry::Pass::kWeight
                                            : geometry::Pass::kBackward;
  for (const geometry::PipeOp& op : schedule.ranks[static_cast<size_t>(rank)]) {
    const auto c = static_cast<size_t>(op.chunk);
    if (op.pass == geometry::Pass::kForward)
      most[c] = std::max(most[c], ++live[c]);
    else if (op.pass == last)
      --live[c];
  }
  return most;
}

// Messages held: three received ones (one read, two on their way), and a copy
// of what is sent back.
int64_t message_bytes(const JobShape& s, const Layout& l, const Coord& at,
                      const Chunk& k, int64_t passes) {
  if (l.pp == 1) return 0;
  const bool ring = chunks_on(s, l) > 1;
  const bool first = at.pp == 0 && !ring;
  const bool last = at.pp == l.pp - 1 && !ring;
  const int64_t received = (first || last ? 1 : 2) * passes;
  return (std::min<int64_t>(3, received) + (first ? 0 : 1)) * k.n * k.D * kFp32;
}

// Elements of each unit, padded to whole shares.
int64_t padded_elements(const ShardTable& shard, int z, bool blocks_only) {
  int64_t sum = 0;
  for (const geometry::Unit& u : shard.units())
    if (!blocks_only || u.kind == geometry::UnitKind::kBlock)
      sum += geometry::share_length(u.numel(), z) * z;
  return sum;
}

// Of the rank's states in shared memory but its own: each segment holds two.
int64_t replica_bytes(const JobShape& s, const Layout& l, int64_t state) {
  const int64_t kept = replicas_kept(s, l);
  const bool own_too = kept > 0 && s.replicate_every > 1;
  return (kept + (own_too ? 1 : 0)) * 2 * 3 * state * kFp32;
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

Memory predict_memory(const JobShape& s, const Layout& l, int rank) {
  const Coord at = l.coord(rank);
  const auto table = geometry::ParamTable::make(s.model);
  const int chunks = chunks_on(s, l);
  const auto bounds = geometry::stage_bounds(s.model, l.pp * chunks, s.T);
  CHECK(bounds.ok());
  const auto shard = ShardTable::make(table, l, at, *bounds, chunks);
  CHECK(shard.ok());
  const int z = shard_group_on(s, l);
  const auto zero = geometry::ZeroPlan::make(
      *shard, {.stage = s.zero_stage, .shard_group = s.zero_stage == 0 ? 0 : z},
      l.dp * l.cp, at.dp * l.cp + at.cp);
  CHECK(zero.ok());
  const bool streams = s.zero_stage == 3 && z > 1;
  const geometry::Schedule schedule = schedule_on(s, l);
  const bool few_gradients =
      s.zero_stage >= 2 && z > 1 && schedule.num_microbatches == 1;
  const int64_t state = zero->state_elements();

  int64_t largest_block = 0, num_blocks = 0, shares = 0;
  for (const geometry::Unit& u : shard->units()) {
    shares += geometry::share_length(u.numel(), z);
    if (u.kind != geometry::UnitKind::kBlock) continue;
    ++num_blocks;
    largest_block =
        std::max(largest_block, geometry::share_length(u.numel(), z) * z);
  }
  const int64_t padded = padded_elements(*shard, z, false);
  const int64_t ends = padded - padded_elements(*shard, z, true);
  const int64_t places = std::min<int64_t>(2, num_blocks) * largest_block;

  const int64_t held = s.keep_state ? 2 : 1;
  int64_t weights = held * state;
  if (z > 1 && !streams) weights += padded;
  if (streams) weights += ends;
  int64_t activations = 0;
  int64_t buffers = replica_bytes(s, l, state);
  const std::vector<int64_t> live = live_slots(schedule, at.pp);
  for (int c = 0; c < chunks; ++c) {
    const Chunk k = chunk_of(s, *shard, c);
    const int64_t first = shard->first_layer(c);
    if (streams) weights += std::min(kStreamedBlocks, k.layers) * largest_block;
    activations += live[static_cast<size_t>(c)] * slot_bytes(s, k, first);
    buffers += scratch_bytes(s, k, first, l) + copies_bytes(s, k, streams);
    if (c == 0)
      buffers += message_bytes(s, l, at, k, schedule.num_microbatches);
  }
  return {.weights = static_cast<uint64_t>(weights * kFp32),
          .gradients = static_cast<uint64_t>(
              (few_gradients ? shares + places + ends : padded) * kFp32),
          .optimizer = static_cast<uint64_t>(held * 2 * state * kFp32),
          .activations = static_cast<uint64_t>(activations),
          .buffers = static_cast<uint64_t>(buffers)};
}

Memory predict_worst_memory(const JobShape& s, const Layout& l) {
  Memory worst;
  // Of data- and context-parallel ranks the first has most of everything, and
  // of tensor-parallel ones the first has most rows.
  for (int pp = 0; pp < l.pp; ++pp) {
    const Memory m = predict_memory(s, l, l.rank({.pp = pp}));
    if (m.total() > worst.total()) worst = m;
  }
  return worst;
}

}  // namespace remesh::planner
