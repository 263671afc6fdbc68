// DirectFile: writes a large file from front to back past the page cache
// (O_DIRECT) while the caller produces the next bytes. Most of the cost of a
// buffered write is copying into fresh pages of the cache; training has better
// use for that time and memory.
//
// It also supports calls that are out of order: they wait for writes in
// progress, and the file uses the page cache from then on. A failed write may
// show in a later call, at the latest in sync() or close(). The destructor
// drops bytes that were neither synced nor closed.
//
// Threads: one thread at a time uses it; a thread of its own writes. That
// starts with the first full buffer, so small files have none.
#pragma once

#include <memory>
#include <string>

#include "proto/base/file_system.h"

namespace remesh {

// Buffers that files reuse: fresh pages cost as much as copying into them.
// Threads: any.
class BufferPool;
std::shared_ptr<BufferPool> make_buffer_pool();

// Owns `fd`, which is open for reading and writing, empty and without O_DIRECT.
// Uses O_DIRECT where the file system supports it.
std::unique_ptr<File> make_direct_file(int fd, std::string path,
                                       const StreamOptions& options,
                                       std::shared_ptr<BufferPool> buffers);

}  // namespace remesh
