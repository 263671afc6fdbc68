// Which meshes can run a job, whatever the slots. The one place of these rules;
// the job file, the planner and the engine ask here.
#pragma once

#include "parallel/geometry/layout.h"
#include "parallel/geometry/model_config.h"

namespace remesh::geometry {

// Each context-parallel rank has two equal parts of a sequence of T tokens.
Status check_context(int64_t T, int cp);

// The model can be sharded that way, every data-parallel rank has one of the
// step's microbatches, a sequence can be split, and each of the pp * chunks
// stages has a layer. The message says what is allowed.
Status check_mesh(const ModelConfig& model, int64_t T, int64_t microbatches,
                  int chunks, const Layout& layout);

}  // namespace remesh::geometry
