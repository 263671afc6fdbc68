// The version of this build, the same for all programs.
#pragma once

#include <string>

namespace remesh {

std::string version();  // "0.1.0", of the CMake project
// Distinguishes builds: "0.1.0+1a2b3c4d5e6f"; ranks of two are never mixed.
std::string build_id();
// What `PROGRAM --version` prints: "PROGRAM 0.1.0 (commit 1a2b3c4d5e6f)".
std::string version_line(const std::string& program);

}  // namespace remesh
