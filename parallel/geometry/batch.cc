#include "parallel/geometry/batch.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::geometry {

MicrobatchRange deal(int64_t num_microbatches, int dp, int dp_index) {
  CHECK(num_microbatches >= 0 && dp_index >= 0 && dp_index < dp);
  const int64_t each = num_microbatches / dp;
  const int64_t more = num_microbatches % dp;  // ranks with one more
  const int64_t begin = dp_index * each + std::min<int64_t>(dp_index, more);
  return {begin, begin + each + (dp_index < more ? 1 : 0)};
}

int owner_of_microbatch(int64_t num_microbatches, int dp, int64_t microbatch) {
  CHECK(dp >= 1 && microbatch >= 0 && microbatch < num_microbatches);
  const int64_t each = num_microbatches / dp;
  const int64_t more = num_microbatches % dp;
  const int64_t in_larger = more * (each + 1);
  if (microbatch < in_larger) return static_cast<int>(microbatch / (each + 1));
  return static_cast<int>(more + (microbatch - in_larger) / each);
}

}  // namespace remesh::geometry
