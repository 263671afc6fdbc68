#include "worker/model/memory.h"

#include "worker/model/llama/buffers.h"

namespace remesh::model {

StageMemory predict_stage_memory(const geometry::ShardTable& shard,
                                 const StageOptions& options, Dtype products,
                                 bool packed) {
  const StageShape shape = shape_of(shard, options, products);
  Pool slots(nullptr);
  Pool buffers(nullptr);
  make_buffers(shape, slots, buffers);
  return {.weights = weight_bytes(shape, packed),
          .activations = slots.bytes(),
          .buffers = buffers.bytes()};
}

}  // namespace remesh::model
