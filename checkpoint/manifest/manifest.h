// The manifest of a checkpoint, the names of its files, and the decisions about
// them. Everything here is a pure function; scan.h reads directories, and
// checkpoint/FORMAT.md specifies the files.
//
//   FOLDER/step-00000100/manifest.json      what the checkpoint holds
//                        shard-00000.h5     one per rank, slices of the state
//                        index.h5           every parameter in full (h5py,
//                                           h5dump)
//   FOLDER/.tmp-step-00000100.g3/           being written by generation 3
//   FOLDER/.old-step-00000100/              being removed
//
// A checkpoint is independent of the mesh that wrote it: its shards hold
// rectangles of parameters, together every element of every parameter exactly
// once.
//
// No HDF5 and no MPI here: the coordinator links this.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "parallel/geometry/slice.h"
#include "proto/base/status.h"
#include "proto/manifest.pb.h"

namespace remesh::manifest {

// The format that is written, and the only one that is read.
inline constexpr int32_t kFormat = 2;
inline constexpr char kManifestName[] = "manifest.json";
inline constexpr char kIndexName[] = "index.h5";
// A file in a checkpoint that retention keeps; its text is the checkpoint's
// name, which may be empty.
inline constexpr char kKeepName[] = "keep";

// "step-00000100" and back (nothing else parses).
std::string step_name(int64_t step);
std::optional<int64_t> parse_step_name(std::string_view name);
// ".tmp-step-00000100.g3" and back.
struct TmpName {
  int64_t step = 0;
  int64_t generation = 0;
  friend bool operator==(const TmpName&, const TmpName&) = default;
};
std::string tmp_name(const TmpName& name);
std::optional<TmpName> parse_tmp_name(std::string_view name);
// ".old-step-00000100", the name of a checkpoint that is being removed.
std::string old_name(int64_t step);
std::optional<int64_t> parse_old_name(std::string_view name);
// "shard-00000.h5", and its sidecar while the checkpoint is written.
std::string shard_name(int rank);
std::string sidecar_name(int rank);

// The text of manifest.json: JSON whose first line holds the xxh128 and the
// length of the body; every byte of the text is covered. Doubles and infinities
// survive exactly; NaN and zero lose their sign.
std::string encode(const pb::Manifest& manifest);
// Corrupt when any byte differs from what encode() wrote, or the format or
// content is unknown to this version.
Result<pb::Manifest> decode(std::string_view text);

// The sizes of the model as the manifest stores them. The second function fails
// when they are not a valid model.
pb::ModelInfo model_info(const geometry::ModelConfig& config);
Result<geometry::ModelConfig> model_config(const pb::ModelInfo& info);

// Of all files but the manifest itself.
uint64_t file_bytes(const pb::Manifest& manifest);

// Ok when the shards' slices cover every element of every parameter of the
// table exactly once; else Corrupt, naming parameter, shard and place.
Status check_coverage(const pb::Manifest& manifest,
                      const geometry::ParamTable& table);

// A rectangle of a parameter as the manifest stores it.
pb::Slice make_slice(const geometry::ParamSpec& spec,
                     const geometry::Rect& rect);

// Corrupt if the checkpoint was written by another run than `run_id`; ok if one
// of the two is unknown (0).
Status check_run(const pb::Manifest& manifest, uint64_t run_id);

// What must be equal in a checkpoint and the job that loads it.
struct JobIdentity {
  geometry::ModelConfig model;
  uint64_t seed = 0;
  std::string data_id;
  int64_t global_batch_size = 0;
  int64_t seq_len = 0;
  std::string base_fingerprint;  // of the frozen model; "": not compared
};
// "model.dim: checkpoint 64, job 32" for each difference; empty if they match.
std::vector<std::string> model_differences(const pb::ModelInfo& checkpoint,
                                           const pb::ModelInfo& job);
// The same for all of it, such as "train.seed: checkpoint 1, job 2".
std::vector<std::string> differences(const pb::Manifest& manifest,
                                     const JobIdentity& job);

// The steps that retention removes, ascending. `valid` and `invalid` are the
// steps found in a folder, in any order. It keeps the keep_latest_k newest
// valid ones, those in `kept`, and, if keep_every_n > 0, the first valid one at
// or after each multiple of it, since a slow disk may skip the multiple. It
// removes an invalid one if a newer valid one exists, and never the newest
// valid one. REQUIRES: keep_latest_k >= 1, keep_every_n >= 0.
std::vector<int64_t> to_remove(const std::vector<int64_t>& valid,
                               const std::vector<int64_t>& invalid,
                               int64_t keep_latest_k, int64_t keep_every_n,
                               const std::set<int64_t>& kept = {});

}  // namespace remesh::manifest
