#include "worker/model/stage.h"

#include <string>

#include "parallel/comm/comm.h"
#include "parallel/geometry/mesh_check.h"
#include "proto/base/check.h"
#include "worker/kernels/backend.h"

namespace remesh::model {
namespace {

using geometry::ShardTable;

// The families of parallel/geometry/family.h.
constexpr struct {
  const char* arch;
  Result<std::unique_ptr<Stage>> (*make)(const ShardTable&, const StageOptions&,
                                         kernels::Backend&);
} kFamilies[] = {{"llama", make_llama_stage},
                 {"mistral", make_llama_stage},
                 {"qwen2", make_llama_stage},
                 {"qwen3", make_llama_stage},
                 {"phi3", make_llama_stage}};

int degree(const comm::Comm* c) { return c == nullptr ? 1 : c->size(); }
int index(const comm::Comm* c) { return c == nullptr ? 0 : c->rank(); }

Status check_groups(const ShardTable& shard, const StageOptions& o) {
  const geometry::Layout& l = shard.layout();
  if (degree(o.tp) != l.tp || index(o.tp) != shard.coord().tp ||
      degree(o.cp) != l.cp || index(o.cp) != shard.coord().cp)
    return invalid_argument(
        "stage: groups of " + std::to_string(degree(o.tp)) +
        " tensor-parallel and " + std::to_string(degree(o.cp)) +
        " context-parallel ranks do not fit " + l.to_string());
  return ok_status();
}

Status check_options(const ShardTable& shard, const StageOptions& o,
                     const kernels::Backend& backend) {
  if (o.chunk < 0 || o.chunk >= shard.chunks())
    return invalid_argument("stage chunk " + std::to_string(o.chunk) +
                            ": allowed: 0 to " +
                            std::to_string(shard.chunks() - 1));
  const int64_t layers = shard.last_layer(o.chunk) - shard.first_layer(o.chunk);
  if (layers < 1)
    return invalid_argument("stage chunk " + std::to_string(o.chunk) +
                            ": needs at least one layer");
  if (o.max_batch < 1 || o.max_seq < 1 || o.num_slots < 1)
    return invalid_argument(
        "stage: microbatch (" + std::to_string(o.max_batch) + "), sequence (" +
        std::to_string(o.max_seq) + ") and slots (" +
        std::to_string(o.num_slots) + ") must be at least 1");
  if (!o.recompute.empty() &&
      static_cast<int64_t>(o.recompute.size()) != layers)
    return invalid_argument(
        "stage: recompute of " + std::to_string(o.recompute.size()) +
        " layers; allowed: none, or the chunk's " + std::to_string(layers));
  if (o.block_buffers < 0 || o.block_buffers == 1)
    return invalid_argument("stage: " + std::to_string(o.block_buffers) +
                            " weight buffers; allowed: 0 (one per layer), or "
                            "at least 2");
  if (o.dtype == Dtype::kBf16 && !backend.supports_bf16())
    return unavailable(
        "bf16 needs AVX512-BF16 or AMX, which this machine lacks; allowed: "
        "fp32");
  if (o.cache < 0 || (o.cache > 0 && shard.layout().world() > 1))
    return invalid_argument(
        "stage: a cache of " + std::to_string(o.cache) + " tokens on " +
        shard.layout().to_string() +
        "; allowed: 0, or any number where one stage has the whole model");
  RETURN_IF_ERROR(geometry::check_context(o.max_seq, shard.layout().cp));
  return check_groups(shard, o);
}

}  // namespace

std::vector<kernels::Document> documents_of(const MicroBatch& mb) {
  std::vector<kernels::Document> out;
  if (mb.document_starts.empty()) return out;
  int64_t at = 0;
  const auto end_at = [&](int64_t next) {
    out.push_back({.first = at, .tokens = next - at});
    at = next;
  };
  for (const int64_t start : mb.document_starts) {
    CHECK(start > at && start < mb.B * mb.T && start % mb.T != 0);
    while (start / mb.T > at / mb.T) end_at((at / mb.T + 1) * mb.T);
    end_at(start);
  }
  while (at < mb.B * mb.T) end_at((at / mb.T + 1) * mb.T);
  return out;
}

std::vector<int32_t> context_positions(int64_t T, int cp, int cp_index) {
  CHECK(cp >= 1 && cp_index >= 0 && cp_index < cp);
  CHECK(cp == 1 || T % (2 * cp) == 0);
  std::vector<int32_t> out;
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      out.push_back(static_cast<int32_t>(t));
  };
  if (cp == 1) {
    add(0, T);
    return out;
  }
  const int64_t piece = T / (2 * cp);
  add(cp_index * piece, (cp_index + 1) * piece);
  const int64_t other = 2 * cp - 1 - cp_index;
  add(other * piece, (other + 1) * piece);
  return out;
}

Result<std::unique_ptr<Stage>> Stage::create(const ShardTable& shard,
                                             const StageOptions& options,
                                             kernels::Backend& backend) {
  RETURN_IF_ERROR(check_options(shard, options, backend));
  if (shard.table().config().lora.rank > 0)
    return make_lora_stage(shard, options, backend);
  const std::string& arch = shard.table().config().arch;
  for (const auto& family : kFamilies)
    if (family.arch == arch) return family.make(shard, options, backend);
  return invalid_argument("model.arch = \"" + arch +
                          "\": this trainer cannot compute it");
}

}  // namespace remesh::model
