// Commands of remesh-data. They store the exit code of the process in *code and
// print errors on stderr.
#pragma once

#include <CLI/CLI.hpp>

#include "proto/base/exit_code.h"
#include "proto/base/json_output.h"
#include "proto/base/status.h"
#include "proto/base/usage.h"

namespace remesh::data {

void add_tokenizer_commands(CLI::App& app, int* code);
void add_inspect(CLI::App& app, int* code);

// Prints the failure and returns its exit code.
inline int fail(const CLI::App& app, const Status& status) {
  const ExitCode code = exit_with(app.get_name(), status);
  return status.code() == Code::kAlreadyExists ? kExitUsage : code;
}

}  // namespace remesh::data
