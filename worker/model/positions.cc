#include "proto/base/check.h"
#include "worker/model/stage.h"

namespace remesh::model {

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

}  // namespace remesh::model
