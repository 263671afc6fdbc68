// What Layouts (store.h) remembers.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sparse_file.h"
#include "checkpoint/store/store.h"

namespace remesh::store {

struct Layouts::Impl {
  std::string shard_of;  // all that the layout depends on, but for the step
  SparseFile shard;      // the bytes between the tensors
  std::vector<StoredTensor> tensors;
  std::string index_of;
  SparseFile index;
};

// lay_out(), from what is remembered where it can be. `layouts` may be null.
Result<ShardLayout> lay_out(Layouts* layouts, const SaveId& id,
                            const geometry::ParamTable& table,
                            const pb::ShardFile& shard);
// The bytes of index.h5. REQUIRES: the manifest's shards cover the table.
Result<std::string> index_bytes(Layouts* layouts, const pb::Manifest& m,
                                const geometry::ParamTable& table);

}  // namespace remesh::store
