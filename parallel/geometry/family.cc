#include "parallel/geometry/family.h"

#include "parallel/geometry/llama.h"
#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

constexpr ModelFamily kFamilies[] = {
    {.name = "llama", .parameters = llama_parameters, .memory = llama_memory}};

}  // namespace

Result<Recompute> parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "selective") return Recompute::kSelective;
  if (name == "full") return Recompute::kFull;
  return invalid_argument("recompute \"" + std::string(name) +
                          "\": must be one of none, selective, full");
}

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

ChunkMemory chunk_memory(const ShardTable& shard, int chunk,
                         const ChunkUse& use) {
  return find_family(shard.table().config().arch)->memory(shard, chunk, use);
}

}  // namespace remesh::geometry
