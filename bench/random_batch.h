// Microbatches of random tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/base/rng.h"
#include "worker/model/stage.h"

namespace remesh::bench {

// Microbatches [begin, end) of the endless sequence of those with B x T tokens,
// so that ranks that share a global batch get different ones.
class RandomBatch {
 public:
  RandomBatch() = default;
  RandomBatch(int64_t begin, int64_t end, int64_t B, int64_t T, int64_t vocab) {
    const int64_t each = B * T;
    tokens_.reserve(static_cast<size_t>((end - begin) * each + 1));
    for (int64_t i = begin * each; i <= end * each; ++i)
      tokens_.push_back(
          static_cast<int32_t>(random_u64(1, 2, static_cast<uint64_t>(i)) %
                               static_cast<uint64_t>(vocab)));
    for (int64_t m = 0; m < end - begin; ++m)
      list_.push_back(
          {tokens_.data() + m * each, tokens_.data() + m * each + 1, B, T});
  }
  // Valid as long as this object; a move keeps it valid.
  const std::vector<model::MicroBatch>& list() const { return list_; }

 private:
  std::vector<int32_t> tokens_;
  std::vector<model::MicroBatch> list_;
};

}  // namespace remesh::bench
