// ModelFamily: what shapes and sizes depend on in a model architecture, so that
// everything outside worker/model works with any of them.
//
// A new family is one entry in family.cc, one source file here for its
// parameters, one folder of worker/model for its arithmetic with an entry in
// worker/model/stage.cc, and its name in the allowed values of model.arch
// (proto/job.proto).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/param_table.h"

namespace remesh::geometry {

struct ModelFamily {
  const char* name;  // job key model.arch
  // Every parameter, in the canonical order: embedding, blocks, final norm and
  // head.
  std::vector<ParamSpec> (*parameters)(const ModelConfig&);
};

// nullptr when there is no such family.
const ModelFamily* find_family(std::string_view name);
// "llama, ...".
std::string family_names();

}  // namespace remesh::geometry
