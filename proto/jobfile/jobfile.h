// Job files: TOML to the message pb::Job and back.
//
// proto/job.proto is the only list of keys: names, types, defaults, bounds,
// allowed values and help come from it by reflection. In a loaded job just
// the keys that the user gave are present; accessors give the defaults. In a
// resolved job every key is present. (One exception: a path with a default,
// job.dump_folder, is present after loading, made absolute from the current
// folder.)
//
// Everything here is pure but load_job(), which reads one file and asks for
// the current folder. Nothing here knows of workers, data sets or meshes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/model_config.h"
#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::jobfile {

// Where a text of TOML came from.
struct Source {
  std::string name = "job.toml";  // in errors, "name:line: ..."
  std::string base_dir = "/";     // absolute; relative paths start here
};

// Reads the file and applies `overrides` in order, each "section.key=value":
// the value is TOML, or a bare string when it is not. Relative paths are
// relative to the job file's folder, in overrides to the current one.
// Fails (invalid_argument) with every problem, one a line: file:line, key,
// value, what is allowed, and for an unknown name the nearest right one.
Result<pb::Job> load_job(const std::string& path,
                         const std::vector<std::string>& overrides = {});

// load_job() on a text. `override_dir`: where paths in overrides start.
Result<pb::Job> parse_job(std::string_view toml, const Source& source,
                          const std::vector<std::string>& overrides = {},
                          const std::string& override_dir = "/");

// What resolve() must know of the data set.
struct DataInfo {
  int64_t vocab_size = 0;
  int64_t train_tokens = -1;  // -1: not known, not checked
  int64_t val_tokens = -1;    // likewise
};

// Fills in everything: the flavor's sizes (keys given win), what -1 stands
// for where the job alone decides it (model.n_kv_heads, hidden_dim,
// vocab_size, schedule.total_steps), and every default; then checks keys
// against each other. What depends on the cluster stays -1 (data-, tensor-,
// pipeline-parallel degree, train.threads, elastic.max_slots,
// elastic.hang_after_s). Resolving a resolved job changes nothing.
Result<pb::Job> resolve(const pb::Job& job, const DataInfo& data);

// The model of a resolved job. REQUIRES: resolve() made it.
geometry::ModelConfig model_config(const pb::Job& resolved);

// The job as TOML, every key written; parse_job() gives back the same
// message when the job is resolved.
std::string to_toml(const pb::Job& job);

// deploy/examples/defaults.toml: every key, commented out with its default,
// under its help text, bounds and allowed values.
std::string commented_example();

}  // namespace remesh::jobfile
