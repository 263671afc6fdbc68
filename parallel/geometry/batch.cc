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

}  // namespace remesh::geometry
