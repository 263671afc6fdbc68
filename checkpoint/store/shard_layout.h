// The layout of a shard file; shared by writer, index and loader.
//
//   /                          attributes format, step, generation, rank
//   /weights/PARAM.0, .1 ...   the shard's slices of PARAM, in its order
//   /exp_avg/PARAM.0 ...       Adam's first moment, the same slices
//   /exp_avg_sq/PARAM.0 ...    second moment
//
// Each dataset has the slice's shape and attributes `start` (its place in the
// parameter) and `shape` (the parameter's). It is contiguous, or chunked if it
// is compressed. The checksums are behind HDF5's end of file: blocks.h.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/store.h"
#include "proto/manifest.pb.h"

namespace remesh::store {

inline constexpr std::array<const char*, geometry::kNumStateVectors> kTensors =
    {"weights", "exp_avg", "exp_avg_sq"};

// "PARAM.k" for each slice of the shard: k counts the slices of one parameter.
std::vector<std::string> slice_names(const pb::ShardFile& shard);
// "/TENSOR/" + slice name.
std::string dataset_path(size_t tensor, const std::string& slice_name);

// Writes everything of a shard except the tensors' elements. `put` makes the
// dataset.
struct TensorId {
  std::string path;
  size_t slice = 0;   // of the shard
  size_t tensor = 0;  // of kTensors
};
using PutTensor = std::function<Status(const TensorId& id,
                                       std::span<const Attribute> attributes)>;
Status write_contents(Hdf5Writer& w, const SaveId& id,
                      const geometry::ParamTable& table,
                      const pb::ShardFile& shard, const PutTensor& put);

// The layout of an uncompressed shard, which does not depend on the elements.
struct StoredTensor {
  uint64_t begin = 0, end = 0;  // bytes
  size_t slice = 0;             // of the shard
  size_t tensor = 0;            // of kTensors
};
struct ShardLayout {
  std::vector<StoredTensor> tensors;  // ascending, disjoint
  std::unique_ptr<File> rest;         // all bytes between them
  uint64_t size = 0;
};
// A function of its arguments and the HDF5 library alone. REQUIRES: the slices
// are in the table.
Result<ShardLayout> lay_out(const SaveId& id, const geometry::ParamTable& table,
                            const pb::ShardFile& shard);

// Opens a shard such that only verified bytes are read. Corrupt, naming the
// file, when it does not match the manifest. The second one reads from `file`.
Result<std::unique_ptr<Hdf5Reader>> open_shard(FileSystem& fs,
                                               const std::string& path,
                                               const pb::ShardFile& shard);
Result<std::unique_ptr<Hdf5Reader>> open_shard(std::shared_ptr<File> file,
                                               const std::string& path,
                                               const pb::ShardFile& shard);

inline Dims start_of(const pb::Slice& s) {
  return {s.start().begin(), s.start().end()};
}
inline Dims count_of(const pb::Slice& s) {
  return {s.count().begin(), s.count().end()};
}

}  // namespace remesh::store
