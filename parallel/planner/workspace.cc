#include <algorithm>
#include <cstdint>

#include "parallel/geometry/param_table.h"
#include "parallel/planner/memory.h"

namespace remesh::planner {
namespace {

constexpr int64_t kFp32 = 4;
constexpr int64_t k16Bit = 2;

// Of sums over so many ranks, eight at once (worker/engine/grad_store.cc), each
// with two blocks in progress, which have a piece of every rank
// (parallel/comm/direct_reduce.h). It is never more than twice what is summed.
int64_t sum_scratch(int64_t ranks) {
  constexpr int64_t kAtOnce = 8, kBlocks = 2, kBlock = 2 << 20;
  constexpr int64_t kLeast = 16 << 10, kMost = 256 << 10;
  return ranks == 1 ? 0
                    : kAtOnce * kBlocks * ranks *
                          std::clamp(kBlock / ranks, kLeast, kMost);
}

}  // namespace

uint64_t predict_workspace(const JobShape& s, const geometry::Layout& l,
                           int threads) {
  const int64_t gradients =
      geometry::ParamTable::make(s.model).num_elements() / l.tp / l.pp * kFp32;
  const int z = shard_group_on(s, l);
  const int64_t sums =
      std::min(2 * gradients, sum_scratch(z) + sum_scratch(l.dp * l.cp / z));
  const int64_t tokens = s.B * s.T / l.cp;
  const int64_t width = std::max(s.model.dim, s.model.hidden_dim / l.tp);
  const int64_t columns = s.bf16 && s.packed ? k16Bit * tokens * width : 0;
  // Six fp32 vectors of a head's sequence; bf16 with AMX needs fewer bytes.
  constexpr int64_t kVectors = 6 * kFp32;
  return static_cast<uint64_t>(sums + columns +
                               threads * kVectors * s.T * s.model.head_dim());
}

}  // namespace remesh::planner
