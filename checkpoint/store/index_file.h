// index.h5: every parameter in full as a virtual dataset over the shards, for
// h5py and h5dump. Loading does not use it.
#pragma once

#include <string>

#include "checkpoint/manifest/manifest.h"
#include "proto/base/file_system.h"

namespace remesh::store {

// The bytes of the file. REQUIRES: the manifest's shards cover the table.
Result<std::string> index_bytes(const pb::Manifest& m,
                                const geometry::ParamTable& table);

// Corrupt, naming the file, if any byte of the index at `path` differs from
// what the manifest's entry `index` says.
Status check_index(FileSystem& fs, const std::string& path,
                   const pb::ShardFile& index);

}  // namespace remesh::store
