// What a core of this host does, found out by another program.
#pragma once

#include <string>

namespace remesh::agent {

// What `program`, remesh-measure, prints with --core: a description that has
// been made on this host before, or a new one, which takes a second or two. Or
// why there is none. Blocks: call it in a thread of its own.
std::string describe_hardware(const std::string& program);

}  // namespace remesh::agent
