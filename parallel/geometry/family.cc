#include "parallel/geometry/family.h"

#include "parallel/geometry/llama.h"
#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

// All with the parameters and the memory of a Llama, by ModelConfig::arch.
constexpr ModelFamily llama_like(const char* name) {
  return {.name = name, .parameters = llama_parameters, .memory = llama_memory};
}

constexpr ModelFamily kFamilies[] = {llama_like("llama"), llama_like("mistral"),
                                     llama_like("qwen2"), llama_like("qwen3"),
                                     llama_like("phi3")};

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
