#include "proto/wire/protocol.h"

#include "proto/base/version.h"

namespace remesh::wire {

// Raise `newest` when a message gains a meaning that the receiver must know,
// and `oldest` when such a meaning is no longer understood without it.
ProtocolRange own_protocol() { return {.newest = 1, .oldest = 1}; }

std::string own_build() { return build_id(); }

}  // namespace remesh::wire
