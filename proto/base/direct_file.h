// DirectFile: writes a large file from front to back past the page cache
// (O_DIRECT), while the caller makes the next bytes. Copying into fresh pages
// of the cache is most of what a buffered write costs, and training has better
// use for that time and memory.
//
// A File like any other, also for calls that are not in order: they wait for
// what is under way and go through the page cache from then on. A write's
// failure may show only in a later call, at the latest in sync() or close().
// Destroyed without sync() or close(), it drops what the disk has not got yet.
//
// Threads: used by one thread at a time; has one thread of its own, which
// writes. It starts with the first full buffer, so small files have none.
#pragma once

#include <memory>
#include <string>

#include "proto/base/file_system.h"

namespace remesh {

// Memory that files hand on to each other: fresh pages cost as much as what is
// copied into them. Threads: any.
class BufferPool;
std::shared_ptr<BufferPool> make_buffer_pool();

// Takes over `fd`, open for reading and writing, empty, without O_DIRECT. Turns
// O_DIRECT on while it serves; where the file system refuses, does without.
std::unique_ptr<File> make_direct_file(int fd, std::string path,
                                       const StreamOptions& options,
                                       std::shared_ptr<BufferPool> buffers);

}  // namespace remesh
