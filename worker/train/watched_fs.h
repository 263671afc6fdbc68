// WatchedFileSystem: a file system that tells of its activity, so that a long
// save or load is seen to move (and a stuck disk is seen not to), and that can
// be told to give up.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "proto/base/file_system.h"

namespace remesh::train {

// Passes everything on to `inner`, which must outlive it; `moved` is called
// after each operation that reads, writes or syncs, in the thread that did it.
// Once `give_up` is true, whatever would change something fails (Cancelled), as
// if the machine had stopped there.
std::unique_ptr<FileSystem> watched_file_system(
    FileSystem& inner, std::function<void()> moved,
    const std::atomic<bool>* give_up = nullptr);

}  // namespace remesh::train
