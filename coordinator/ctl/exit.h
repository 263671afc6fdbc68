// Exit codes of `remesh`, and the one way a command reports an error.
#pragma once

#include <fmt/format.h>

#include <cstdio>

#include "proto/base/status.h"

namespace remesh::ctl {

inline constexpr int kExitOk = 0;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitFailed = 3;
inline constexpr int kExitInterrupted = 130;

// Prints the error on stderr and returns the exit code that it maps to.
inline int fail(const Status& status) {
  fmt::print(stderr, "remesh: {}\n", status.message());
  return status.code() == Code::kInvalidArgument ||
                 status.code() == Code::kNotFound
             ? kExitUsage
             : kExitFailed;
}

}  // namespace remesh::ctl
