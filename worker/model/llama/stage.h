// The Stage of the Llama family: RMSNorm, rotary grouped-query attention,
// SwiGLU blocks between an embedding and a head that may share their weights.
#pragma once

#include <memory>

#include "worker/model/stage.h"

namespace remesh::model {

// REQUIRES: Stage::create() has checked the options.
Result<std::unique_ptr<Stage>> make_llama_stage(
    const geometry::ShardTable& shard, const StageOptions& options,
    kernels::Backend& backend);

}  // namespace remesh::model
