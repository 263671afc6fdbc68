// The sidecar of a shard in the temporary directory: a serialised ShardFile
// behind its checksum. Its presence means that the shard is complete and
// durable, so rank 0 collects the shards without any message. The sidecar
// itself need not survive a power failure: an unfinished save is given up then.
#pragma once

#include <string>

#include "checkpoint/store/store.h"

namespace remesh::store {

// FOLDER/.tmp-step-...: the directory of the save `id`.
std::string tmp_path(const std::string& folder, const SaveId& id);
// Atomic.
Status write_sidecar(FileSystem& fs, const std::string& dir,
                     const pb::ShardFile& shard);
Result<pb::ShardFile> read_sidecar(FileSystem& fs, const std::string& dir,
                                   int rank);

}  // namespace remesh::store
