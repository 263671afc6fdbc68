// The checksum of HDF5's fletcher32 filter (Fletcher 1982), so that a chunk
// can be handed to HDF5 ready made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace remesh::store {

// REQUIRES: an even number of bytes, at most 8 MiB.
uint32_t fletcher32(std::span<const std::byte> bytes);

}  // namespace remesh::store
