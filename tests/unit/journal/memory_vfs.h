// MemoryVfs: SQLite on a FileSystem, so that a test can make the journal's own
// reads, writes and syncs fail or crash as it does those around them.
//
// Locks always succeed: one connection at a time. Like SQLite's Unix VFS it
// syncs the directory of a new rollback journal with the first sync of the
// file.
#pragma once

#include <sqlite3.h>

#include "proto/base/file_system.h"

namespace remesh::server {

// While it lives, it is the VFS that SQLite uses by default.
class MemoryVfs {
 public:
  MemoryVfs();
  ~MemoryVfs();
  MemoryVfs(const MemoryVfs&) = delete;
  MemoryVfs& operator=(const MemoryVfs&) = delete;

  // Files opened from now on are in `fs`, which must outlive them.
  void use(FileSystem* fs) { fs_ = fs; }
  FileSystem& fs() { return *fs_; }

 private:
  sqlite3_vfs vfs_{};
  FileSystem* fs_ = nullptr;
};

}  // namespace remesh::server
