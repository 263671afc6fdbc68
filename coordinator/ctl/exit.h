// The one way a command of `remesh` reports an error.
#pragma once

#include "proto/base/exit_code.h"

namespace remesh::ctl {

// Prints the error on stderr and returns the exit code that it maps to.
inline int fail(const Status& status) { return exit_with("remesh", status); }

}  // namespace remesh::ctl
