// Where things stand inside a shard file; shared by writer, index and loader.
//
//   /                          attributes format, step, generation, rank
//   /weights/PARAM/0, 1 ...    the shard's slices of PARAM, in its order
//   /exp_avg/PARAM/0 ...       Adam's first moment, the same slices
//   /exp_avg_sq/PARAM/0 ...    second moment
//
// Each dataset has the slice's shape and attributes `start` (its place in the
// parameter) and `shape` (the whole parameter's).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "checkpoint/store/hdf5_file.h"
#include "proto/manifest.pb.h"

namespace remesh::store {

inline constexpr std::array<const char*, 3> kTensors = {"weights", "exp_avg",
                                                        "exp_avg_sq"};

// "PARAM/k" for each slice of the shard: k counts the slices of one parameter.
std::vector<std::string> slice_names(const pb::ShardFile& shard);
// "/TENSOR/" + slice name.
std::string dataset_path(size_t tensor, const std::string& slice_name);

inline Dims start_of(const pb::Slice& s) {
  return {s.start().begin(), s.start().end()};
}
inline Dims count_of(const pb::Slice& s) {
  return {s.count().begin(), s.count().end()};
}

}  // namespace remesh::store
