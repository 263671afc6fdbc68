#include "proto/base/exit_code.h"

#include <fmt/format.h>

#include <cstdio>

namespace remesh {

ExitCode exit_code_of(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return kExitOk;
    case Code::kInvalidArgument:
      return kExitUsage;
    case Code::kNotFound:
      return kExitNotFound;
    case Code::kEnded:
      return kExitEnded;
    case Code::kUnavailable:
      return kExitTryAgain;
    default:
      return kExitFailed;
  }
}

void print_error(std::string_view text) {
  (void)std::fwrite(text.data(), 1, text.size(), stderr);
}

ExitCode exit_with(std::string_view program, const Status& status) {
  print_error(fmt::format("{}: {}\n", program, status.message()));
  return exit_code_of(status);
}

}  // namespace remesh
