// What checkpoints a folder holds, by cheap checks: the manifest's checksum,
// and every shard there with the right size. store/verify.h reads everything.
//
// Only reads; may run while others write there: what is being written has a
// name that is skipped.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/manifest/manifest.h"
#include "proto/base/file_system.h"

namespace remesh::manifest {

struct Found {
  int64_t step = 0;
  std::string path;       // of the checkpoint's directory
  pb::Manifest manifest;  // when status is ok
  Status status;          // else why it does not count
};

// The manifest in directory `path` alone: checksum and content, and that it is
// of the step in the directory's name (when that is step-*).
Result<pb::Manifest> read_manifest(FileSystem& fs, const std::string& path);

// The checkpoint in directory `path` by the cheap checks. Corrupt or NotFound
// with the file named.
Result<pb::Manifest> read_checkpoint(FileSystem& fs, const std::string& path);

// Every step-* directory, newest first, valid or not. A missing folder is an
// empty list; one that cannot be listed an error.
Result<std::vector<Found>> scan(FileSystem& fs, const std::string& folder);

// Newest valid one, or nullptr.
const Found* choose_newest_valid(const std::vector<Found>& found);

}  // namespace remesh::manifest
