// What a core of this host does, found out by another program.
#pragma once

#include <string>

#include "worker/agent/core/agent.h"

namespace remesh::agent {

// What `program`, remesh-measure, prints with --core: a description that has
// been made on this host before, or a new one, which takes a second or two.
// Blocks: call it in a thread of its own.
HardwareMeasured describe_hardware(const std::string& program);

}  // namespace remesh::agent
