// Parameter groups: what optimizer.groups says of each parameter. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::jobfile {

struct ParamGroup {
  std::string pattern;                 // of the whole name; * is any text
  double lr = 1;                       // times optimizer.lr
  std::optional<double> weight_decay;  // instead of optimizer.weight_decay
  bool frozen = false;                 // not updated at all
};

// "PATTERN [lr=FACTOR] [weight_decay=DECAY]" or "PATTERN frozen".
Result<ParamGroup> parse_param_group(std::string_view text);

// The group of each parameter of the table, nullptr for those of none. `groups`
// must outlive the result, unchanged.
std::vector<const ParamGroup*> groups_of(const geometry::ParamTable& table,
                                         const std::vector<ParamGroup>& groups);

// InvalidArgument, naming the group, if one is no such text or has no
// parameter, or if all parameters are frozen. The group of a matrix that has
// adapters in place of its own training is allowed, and has no effect.
Result<std::vector<ParamGroup>> param_groups(
    const pb::Optimizer& optimizer, const geometry::ModelConfig& model);

}  // namespace remesh::jobfile
