#include "checkpoint/huggingface/file_tensors.h"

#include <string>

namespace remesh::huggingface {
namespace {

using geometry::Role;

// Parameters that begin with this one and are one tensor, and its name.
struct Fused {
  size_t count = 1;
  std::string of, name;  // replaced in the parameter's name
};

Fused fused_with(const geometry::ParamTable& table, Role role) {
  if (table.config().arch != "phi3") return {};
  if (role == Role::kQuery)
    return {.count = 3, .of = "q_proj", .name = "qkv_proj"};
  if (role == Role::kGate)
    return {.count = 2, .of = "gate_proj", .name = "gate_up_proj"};
  return {};
}

}  // namespace

std::vector<FileTensor> file_tensors(const geometry::ParamTable& table) {
  std::vector<FileTensor> out;
  for (size_t p = 0; p < table.size();) {
    const Fused f = fused_with(table, table[p].role);
    FileTensor t{.tensor = {table[p].name, table[p].shape},
                 .first = p,
                 .last = p + f.count};
    if (f.count > 1)
      t.tensor.name.replace(t.tensor.name.find(f.of), f.of.size(), f.name);
    for (size_t i = p + 1; i < t.last; ++i)
      t.tensor.shape[0] += table[i].shape[0];
    p = t.last;
    out.push_back(std::move(t));
  }
  return out;
}

}  // namespace remesh::huggingface
