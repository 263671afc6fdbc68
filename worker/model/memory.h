// The memory of a stage before there is one: what Stage::memory() will say,
// byte for byte, from the same code that allocates. Pure.
//
// With d the bytes of a product's element (4 or 2) and everything of this rank
// (heads, hidden and vocabulary split over tensor-parallel ranks; N rows of a
// microbatch, of which the residual stream has n = ceil(N / tp), P = n tp;
// q and kv: query and key/value dimensions; D, F, V as ever):
//
// weights      compute copies of matrices; in fp32 none, as they are read where
//              the caller has them. In bf16 2 bytes an element, or, where the
//              backend packs them for AMX, two copies, that is 4 bytes, with
//              the sides of each matrix rounded up to 32:
//                each layer (or each of block_buffers): (q + 2 kv, D), (D, q),
//                (2 F, D), (D, F); head: (V, D) in pieces of 4096 rows
// activations  num_slots times:
//   each layer none       8 n D + 8 n + 2 d P D + d N (2 q + 2 kv + 2 F)
//                         + 4 N heads
//              selective  the same without d N (q + 2 F) + 4 N heads
//              full       4 n D
//      split backward     none (also for selective): and
//                         d N (F + q + 2 kv) + 2 d P D + 8 D
//                         full: 4 n D + 4 d P D + d N (2 q + 2 kv + 3 F) + 8 D
//   first stage           4 N; split: and 4 n D
//   last stage            4 n D + d P D + 4 n + 8 N; in bf16, unless the last
//                         layer is recomputed, and d N V; split: and 4 D
//   other stages          4 n D
// buffers      whatever the slots: a layer's worth of what lives inside a pass
//              or is kept by no slot, evaluation lying in the same memory;
//              rotary tables; with context parallelism three gradients and two
//              copies of keys and values, and fp32 queries
//
// Beside it stand the backend's own workspaces (a few MB a thread).
#pragma once

#include "worker/model/stage.h"

namespace remesh::model {

using StageMemory = Stage::Memory;

// `products`: the type they run in (Backend::product_dtype); `packed`: the
// backend packs bf16 weights for AMX. The options' comms are not looked at:
// degrees are the shard table's. REQUIRES: sizes that Stage::create() takes.
StageMemory predict_stage_memory(const geometry::ShardTable& shard,
                                 const StageOptions& options, Dtype products,
                                 bool packed);

}  // namespace remesh::model
