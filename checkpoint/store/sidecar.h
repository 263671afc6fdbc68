// The note beside a shard in the temporary directory: a serialised ShardFile
// under a checksum. Its presence says that the shard is complete and durable,
// so rank 0 collects what others wrote without any message. The note itself
// need not outlast a power cut: what was being written then is given up.
#pragma once

#include <string>

#include "checkpoint/store/store.h"

namespace remesh::store {

// FOLDER/.tmp-step-...: where the save `id` is being written.
std::string tmp_path(const std::string& folder, const SaveId& id);
// Appears whole or not at all.
Status write_sidecar(FileSystem& fs, const std::string& dir,
                     const pb::ShardFile& shard);
Result<pb::ShardFile> read_sidecar(FileSystem& fs, const std::string& dir,
                                   int rank);

}  // namespace remesh::store
