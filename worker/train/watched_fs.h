// WatchedFileSystem: a file system that tells of its activity, so that a long
// save or load is seen to move (and a stuck disk is seen not to).
#pragma once

#include <functional>
#include <memory>

#include "checkpoint/manifest/file_system.h"

namespace remesh::train {

// Passes everything on to `inner`, which must outlive it; `moved` is called
// after each operation that reads, writes or syncs, in the thread that did it.
std::unique_ptr<manifest::FileSystem> watched_file_system(
    manifest::FileSystem& inner, std::function<void()> moved);

}  // namespace remesh::train
