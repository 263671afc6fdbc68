// stream_copy: memcpy for data that is not read soon. It uses non-temporal
// stores, so that the target's cache lines are not read before they are written
// and do not evict others. About a quarter faster than memcpy for a state that
// is copied once and hashed on the way.
#pragma once

#include <cstddef>

namespace remesh::memory {

// REQUIRES: no overlap. A caller that publishes the bytes to other threads must
// fence its stores first (StateSegment::commit() does).
void stream_copy(void* to, const void* from, size_t bytes);

}  // namespace remesh::memory
