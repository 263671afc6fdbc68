// Replaces proto/wire/protocol.cc: a program of another build.
#include "proto/wire/protocol.h"

namespace remesh::wire {

ProtocolRange own_protocol() {
  return {.newest = OTHER_NEWEST, .oldest = OTHER_OLDEST};
}

std::string own_build() { return "other+" + std::to_string(OTHER_NEWEST); }

}  // namespace remesh::wire
