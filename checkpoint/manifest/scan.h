// Finds the checkpoints in a folder with cheap checks: the manifest's checksum,
// and that every shard exists with the right size. store/verify.h reads
// everything.
//
// Only reads, and may run while others write there: incomplete checkpoints have
// names that it skips.
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
  Status status;          // why it is not valid
  bool kept = false;      // may_be_kept()
};

// The manifest in directory `path` alone: checks its checksum and content, and
// that its step matches the directory's name (if that is step-*).
Result<pb::Manifest> read_manifest(FileSystem& fs, const std::string& path);

// The checkpoint in directory `path` by the cheap checks. Corrupt or NotFound
// with the file named.
Result<pb::Manifest> read_checkpoint(FileSystem& fs, const std::string& path);

// Whether the checkpoint in directory `path` has a file named kKeepName, or
// that cannot be known now.
bool may_be_kept(FileSystem& fs, const std::string& path);

// Every step-* directory, newest first, valid or not. A missing folder is an
// empty list; a folder that cannot be listed is an error.
Result<std::vector<Found>> scan(FileSystem& fs, const std::string& folder);

// NotFound, with the steps that `folder` has instead.
Status no_such_step(const std::string& folder, int64_t step,
                    const std::vector<Found>& found);

// Newest valid one, or nullptr. For programs that are given a folder without
// the run whose history tells what was abandoned (core::abandoned_by() in
// coordinator/core/state_choice.h): one of an older generation with a larger
// step is on a branch that the newer generation, which was at a smaller step,
// abandoned.
const Found* choose_newest_valid(const std::vector<Found>& found);

}  // namespace remesh::manifest
