#include "proto/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace remesh {

void check_failed(const char* file, int line, const char* condition,
                  const char* message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %s\n", file, line, condition,
               message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace remesh
