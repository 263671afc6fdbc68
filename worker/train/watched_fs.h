// WatchedFileSystem: decorates a file system so that it reports progress, which
// distinguishes a long save or load from a stuck disk, and can be cancelled.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "proto/base/file_system.h"

namespace remesh::train {

// Forwards to `inner`, which must outlive it. Calls `moved` after each
// operation that reads, writes or syncs, in the same thread. Once `give_up` is
// true, operations that would change something fail with Cancelled, as if the
// machine had stopped.
std::unique_ptr<FileSystem> watched_file_system(
    FileSystem& inner, std::function<void()> moved,
    const std::atomic<bool>* give_up = nullptr);

}  // namespace remesh::train
