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

// The exit code of a command; prints why it failed.
inline int exit_code(const CLI::App& app, const Status& status) {
  if (status.ok()) return kExitOk;
  const ExitCode code = exit_with(app.get_name(), status);
  return status.code() == Code::kAlreadyExists ? kExitUsage : code;
}

}  // namespace remesh::data
