// Facts about this process and about processes that ended.
#pragma once

#include <string>

#include "proto/base/status.h"

namespace remesh {

// The name of this machine, as gethostname() reports it.
std::string host_name();

// The path of the program `name` in the folder of the running program; NotFound
// when it cannot be executed.
Result<std::string> program_beside(const std::string& name);

// "exit code 3", or "signal 9 (SIGKILL)" when `signal` is not 0.
std::string exit_text(int signal, int exit_code);

}  // namespace remesh
