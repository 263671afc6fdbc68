// ModelFamily: what shapes and sizes depend on in a model architecture, so that
// everything outside worker/model works with any of them.
//
// A new family is one entry in family.cc, one source file here for its
// parameters and memory, one folder of worker/model for its arithmetic with an
// entry in worker/model/stage.cc, and its name in the allowed values of
// model.arch (proto/job.proto). CONTRIBUTING.md lists what a family that is not
// shaped like Llama touches besides.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/shard_table.h"

namespace remesh::geometry {

// What of a layer's activations is kept from forward to backward:
//   kNone       everything
//   kSelective  all but attention's output and the SwiGLU product's inputs,
//               which take most of the memory and are computed again (after
//               Korthikanti et al. 2022, section 5)
//   kFull       the layer's input alone
// A split backward keeps more for the weight gradients: kSelective is then as
// kNone. The head keeps its logits, in bf16, unless the chunk's last layer is
// recomputed.
enum class Recompute { kNone, kSelective, kFull };
// The job key train.recompute: "none", "selective", "full".
Result<Recompute> parse_recompute(std::string_view name);

// How a rank computes with a model chunk, as far as memory depends on it.
struct ChunkUse {
  int64_t max_batch = 1;  // sequences a microbatch
  int64_t max_seq = 1;    // tokens a sequence, before context parallelism
  bool bf16 = false;      // GEMMs in bf16, else in fp32
  // The backend packs bf16 weights twice, as for AMX: for forward and backward.
  bool packed = true;
  bool split_backward = false;
  std::vector<Recompute> recompute;  // by layer of the chunk
  int64_t block_buffers = 0;  // blocks whose weights exist at once; 0: all
};

// Bytes that a chunk takes besides the fp32 weights, gradients and optimizer
// state. Weight matrices in fp32 are read where they are and take nothing.
struct ChunkMemory {
  uint64_t weights = 0;      // copies of the matrices to compute with
  uint64_t activations = 0;  // of one microbatch, from forward to backward
  uint64_t buffers = 0;      // whatever the number of microbatches
  uint64_t message = 0;      // activations sent to the next stage
};

struct ModelFamily {
  const char* name;  // job key model.arch
  // Every parameter, in the canonical order: embedding, blocks, final norm and
  // head.
  std::vector<ParamSpec> (*parameters)(const ModelConfig&);
  // Exact: the stage (worker/model) allocates as much. REQUIRES: a recompute
  // entry for each of the chunk's layers.
  ChunkMemory (*memory)(const ShardTable&, int chunk, const ChunkUse&);
};

// nullptr when there is no such family.
const ModelFamily* find_family(std::string_view name);
// "llama, ...".
std::string family_names();

ChunkMemory chunk_memory(const ShardTable& shard, int chunk,
                         const ChunkUse& use);

}  // namespace remesh::geometry
