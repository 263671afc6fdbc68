#include "proto/base/exit_code.h"

#include <fmt/format.h>

#include <cstdio>

namespace remesh {

ExitCode exit_code_of(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return kExitOk;
    case Code::kInvalidArgument:
    case Code::kNotFound:
      return kExitUsage;
    default:
      return kExitFailed;
  }
}

ExitCode exit_with(std::string_view program, const Status& status) {
  fmt::print(stderr, "{}: {}\n", program, status.message());
  return exit_code_of(status);
}

}  // namespace remesh
