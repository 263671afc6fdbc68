#include "parallel/geometry/batch.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::geometry {

MicrobatchRange even_share(int64_t n, int parts, int index) {
  CHECK(n >= 0 && index >= 0 && index < parts);
  const int64_t each = n / parts;
  const int64_t more = n % parts;  // parts with one element more
  const int64_t begin = index * each + std::min<int64_t>(index, more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

}  // namespace remesh::geometry
