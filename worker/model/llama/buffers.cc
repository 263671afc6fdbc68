#include "worker/model/llama/buffers.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::model {
namespace {

using geometry::ShardTable;

void* make_part(Pool& pool, const StageShape& shape, Part part) {
  const Sizes& s = shape.sizes;
  const Rows& r = shape.max;
  switch (part) {
    case kX:
    case kX1:
      return pool.floats(r.n * s.dim);
    case kH1:
    case kH2:
    case kDy:
    case kDmid:
      return pool.get(r.P * s.dim, shape.dtype);
    case kRstd1:
    case kRstd2:
      return pool.floats(r.n);
    case kQkv:
    case kDqkv:
      return pool.get(r.N * s.qkv_dim(), shape.dtype);
    case kQk:
      return s.head_norm ? pool.get(r.N * (s.q_dim() + s.kv_dim()), shape.dtype)
                         : nullptr;
    case kRstdQk:
      return s.head_norm ? pool.floats(r.N * (s.heads + s.kv_heads)) : nullptr;
    case kDqkNorm:
      return s.head_norm ? pool.floats(2 * s.head_dim) : nullptr;
    case kLse:
      return pool.floats(r.N * s.heads);
    case kO:
      return pool.get(r.N * s.q_dim(), shape.dtype);
    case kGu:
      return pool.get(r.N * 2 * s.hidden, shape.dtype);
    case kS:
      return pool.get(r.N * s.hidden, shape.dtype);
    case kDnorm1:
    case kDnorm2:
      return pool.floats(s.dim);
    case kNumParts:
      break;
  }
  CHECK(false);
  return nullptr;
}

// Whether a layer's slot has the part.
bool kept(Part part, Recompute r, bool split) {
  switch (part) {
    case kX:
      return true;
    case kS:
    case kDy:
    case kDmid:
    case kDqkv:
    case kDnorm1:
    case kDnorm2:
    case kDqkNorm:
      return split;
    case kH1:
    case kH2:
      return split || r != Recompute::kFull;
    case kO:
    case kGu:
      return split || r == Recompute::kNone;
    case kLse:
      return r == Recompute::kNone;
    default:
      return r != Recompute::kFull;
  }
}

Slot make_slot(const StageShape& shape, Pool& pool) {
  Slot s;
  const Rows& r = shape.max;
  const int64_t dim = shape.sizes.dim;
  for (const Recompute layer : shape.recompute) {
    BlockParts parts;
    for (int p = 0; p < kNumParts; ++p)
      if (kept(static_cast<Part>(p), layer, shape.split_backward))
        parts.at[static_cast<size_t>(p)] =
            make_part(pool, shape, static_cast<Part>(p));
    s.blocks.push_back(parts);
  }
  if (shape.has_head) {
    s.head = {.x = pool.floats(r.n * dim),
              .h = pool.get(r.P * dim, shape.dtype),
              .rstd = pool.floats(r.n),
              .lse = pool.floats(r.N),
              .targets = pool.ints(r.N)};
    if (shape.dtype == Dtype::kBf16 &&
        shape.recompute.back() == Recompute::kNone)
      s.head.logits = pool.get(r.N * shape.sizes.vocab, shape.dtype);
    if (shape.split_backward) s.head.dnorm = pool.floats(dim);
  } else {
    s.output = pool.floats(r.n * dim);
  }
  if (shape.has_embedding) {
    s.tokens = pool.ints(r.N);
    if (shape.split_backward) s.dx = pool.floats(r.n * dim);
  }
  return s;
}

// Parts that no slot has. Everything that evaluate() needs is placed in memory
// that only backward would use.
void make_shared(const StageShape& shape, Pool& pool, StageBuffers& b) {
  const bool split = shape.split_backward;
  const auto again = [&](Part p) {  // recomputed in backward
    return std::any_of(shape.recompute.begin(), shape.recompute.end(),
                       [&](Recompute r) { return !kept(p, r, split); });
  };
  auto& at = b.shared.at;
  const auto make = [&](Part p) { at[p] = make_part(pool, shape, p); };
  if (!split) {
    for (const Part p : {kDy, kDqkv, kDnorm1, kDqkNorm}) make(p);
    at[kDmid] = at[kDy];
    at[kDnorm2] = at[kDnorm1];
  }
  for (const Part p : {kH1, kRstd1, kQk, kRstdQk, kLse, kGu, kS}) make(p);
  const auto place = [&](Part p, bool alone, void* with) {
    at[p] = with;
    if (alone) make(p);
  };
  place(kH2, again(kH2), at[kH1]);
  place(kRstd2, again(kRstd2), at[kRstd1]);
  place(kQkv, again(kQkv) || split, at[kDqkv]);
  Scratch& x = b.scratch;
  const Sizes& s = shape.sizes;
  x.dattention = pool.get(shape.max.N * s.q_dim(), shape.dtype);
  place(kO, again(kO), x.dattention);
  x.ds = again(kGu) ? pool.get(shape.max.N * s.hidden, shape.dtype) : at[kGu];
  // The residual stream of evaluate() is one buffer; x1 is apart from x only
  // when a layer is recomputed.
  void* stream = make_part(pool, shape, kX);
  if (again(kX1)) make(kX1);
  BlockParts parts;
  parts.at[kX] = stream;
  if (at[kX1] == nullptr) parts.at[kX1] = stream;
  b.evaluation.blocks.assign(shape.recompute.size(), parts);
  b.evaluation.output = static_cast<float*>(stream);
}

void make_head(const StageShape& shape, Pool& pool, StageBuffers& b) {
  const int64_t N = shape.max.N;
  Scratch& x = b.scratch;
  x.piece =
      pool.get(N * std::min(kPieceColumns, shape.sizes.vocab), shape.dtype);
  x.row_max = pool.floats(N);
  if (shape.sizes.tp > 1) x.new_max = pool.floats(N);
  x.row_sums = pool.floats(2 * N);
  b.evaluation.head = {.x = b.evaluation.output,
                       .h = b.shared[kH1],
                       .rstd = b.shared.f(kRstd1),
                       .lse = pool.floats(N),
                       .targets = pool.ints(N)};
}

void make_ring(const StageShape& shape, Pool& pool, Scratch& x) {
  const Sizes& s = shape.sizes;
  const int64_t N = shape.max.N;
  x.attention = pool.floats(N * s.q_dim());
  for (void*& p : x.kv) p = pool.get(N * 2 * s.kv_dim(), shape.dtype);
  for (float*& p : x.dkv) p = pool.floats(N * 2 * s.kv_dim());
}

void make_cache(const StageShape& shape, Pool& pool, StageBuffers& b) {
  const Sizes& s = shape.sizes;
  b.scratch.attention = pool.floats(shape.max.N * s.q_dim());
  for (int64_t i = 0; i < shape.num_layers(); ++i)
    b.cache.push_back(pool.get(shape.cache * 2 * s.kv_dim(), shape.dtype));
}

void make_rope(const StageShape& shape, Pool& pool, StageBuffers& b) {
  const int64_t half = shape.sizes.head_dim / 2;
  const auto table = [&](int64_t T) {
    float* cos = pool.floats(T * half);
    return RopeView{cos, pool.floats(T * half)};
  };
  b.rope_all = table(std::max(shape.max_seq, shape.cache));
  b.rope = shape.sizes.cp == 1 ? b.rope_all : table(shape.max.T);
}

}  // namespace

BlockParts overlay(const BlockParts& own, const BlockParts& shared) {
  BlockParts out = shared;
  for (size_t p = 0; p < own.at.size(); ++p)
    if (own.at[p] != nullptr) out.at[p] = own.at[p];
  return out;
}

StageShape shape_of(const ShardTable& shard, const StageOptions& o) {
  const int64_t layers = shard.last_layer(o.chunk) - shard.first_layer(o.chunk);
  StageShape s{o, sizes_of(shard, o.chunk)};
  s.max = rows_of(s.sizes, o.max_batch, o.max_seq);
  s.has_embedding = shard.has_embedding(o.chunk);
  s.has_head = shard.has_head(o.chunk);
  s.recompute.resize(static_cast<size_t>(layers), Recompute::kNone);
  // What a split backward keeps for the weight gradients need not be
  // recomputed.
  if (o.split_backward)
    std::replace(s.recompute.begin(), s.recompute.end(), Recompute::kSelective,
                 Recompute::kNone);
  return s;
}

StageBuffers make_buffers(const StageShape& shape, Pool& slots, Pool& buffers) {
  StageBuffers b;
  const Sizes& s = shape.sizes;
  for (int i = 0; i < shape.num_slots; ++i)
    b.slots.push_back(make_slot(shape, slots));
  b.scratch.partial = buffers.floats(shape.max.P * s.dim);
  if (s.tp > 1) b.scratch.mine = buffers.floats(shape.max.n * s.dim);
  if (shape.dtype != Dtype::kFp32 || shape.split_backward)
    b.dx = buffers.floats(shape.max.n * s.dim);
  make_shared(shape, buffers, b);
  if (shape.has_embedding) b.evaluation.tokens = buffers.ints(shape.max.N);
  if (shape.has_head) make_head(shape, buffers, b);
  if (s.cp > 1) make_ring(shape, buffers, b.scratch);
  if (shape.cache > 0) make_cache(shape, buffers, b);
  make_rope(shape, buffers, b);
  return b;
}

}  // namespace remesh::model
