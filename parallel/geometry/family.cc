#include "parallel/geometry/family.h"

#include "parallel/geometry/llama.h"
#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

constexpr ModelFamily kFamilies[] = {
    {.name = "llama", .parameters = llama_parameters}};

}  // namespace

const ModelFamily* find_family(std::string_view name) {
  for (const ModelFamily& f : kFamilies)
    if (f.name == name) return &f;
  return nullptr;
}

std::string family_names() {
  std::vector<std::string> names;
  for (const ModelFamily& f : kFamilies) names.emplace_back(f.name);
  return join(names);
}

}  // namespace remesh::geometry
