// CHECK: a programming error ends the process and reports file, line and
// condition. Operating failures return a Status instead (status.h).
#pragma once

namespace remesh {
[[noreturn]] void check_failed(const char* file, int line,
                               const char* condition, const char* message);
}  // namespace remesh

#define CHECK(cond)                                          \
  do {                                                       \
    if (!(cond)) [[unlikely]]                                \
      ::remesh::check_failed(__FILE__, __LINE__, #cond, ""); \
  } while (0)
#define CHECK_MSG(cond, message)                                    \
  do {                                                              \
    if (!(cond)) [[unlikely]]                                       \
      ::remesh::check_failed(__FILE__, __LINE__, #cond, (message)); \
  } while (0)
