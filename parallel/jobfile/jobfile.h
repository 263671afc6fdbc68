// Job files: TOML to the message pb::Job and back.
//
// proto/job.proto is the only list of keys: names, types, defaults, bounds,
// allowed values and help come from it by reflection. A loaded job has only the
// keys that the user gave; accessors return defaults for the others. A resolved
// job has every key. (One exception: a path with a default, job.dump_folder, is
// present after loading, made absolute from the current folder.)
//
// Everything here is pure except load_job(), which reads one file and the name
// of the current folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/model_config.h"
#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::jobfile {

// The origin of a TOML text.
struct TomlOrigin {
  std::string name = "job.toml";  // in errors, "name:line: ..."
  std::string base_dir = "/";     // absolute; relative paths start here
};

// Reads the file and applies `overrides` in order, each "section.key=value";
// the value is TOML, or else a bare string. Paths are relative to the job
// file's folder, in overrides to the current one. Fails (InvalidArgument) with
// all problems, one per line: file:line, key, value, what is allowed, and for
// an unknown name the nearest valid one. Keys that neither gives are those of
// `base`. Without a path, only the overrides apply to it. kStandardInput reads
// the standard input, from its beginning if it is a file.
inline constexpr char kStandardInput[] = "-";
Result<pb::Job> load_job(const std::string& path,
                         const std::vector<std::string>& overrides = {},
                         const pb::Job& base = {});

// The text of such a file. InvalidArgument if it is a folder or over 1 MiB.
Result<std::string> read_text(const std::string& path);

// load_job() on a text. Paths in overrides are relative to `override_dir`.
Result<pb::Job> parse_job(std::string_view toml, const TomlOrigin& origin,
                          const std::vector<std::string>& overrides = {},
                          const std::string& override_dir = "/",
                          const pb::Job& base = {});
// Reads a description (proto/cluster.proto) with the same errors: unknown keys,
// values out of bounds, required keys that are missing.
Status parse_description(std::string_view toml, const TomlOrigin& origin,
                         google::protobuf::Message* file);
Status load_description(const std::string& path,
                        google::protobuf::Message* file);
// The description as TOML: the keys that it has.
std::string description_text(const google::protobuf::Message& file);

// "train.steps" of "train.steps=40".
std::string override_key(std::string_view text);

// What resolve() needs to know about the data set and the initial weights.
struct DataInfo {
  int64_t vocab_size = 0;
  int64_t train_tokens = -1;  // -1: unknown, not checked
  int64_t val_tokens = -1;    // likewise
  // Training tokens of the smallest member of a mixture; -1: train_tokens.
  int64_t least_train_tokens = -1;
  int64_t largest_token = -1;  // that occurs; -1: any of the vocabulary may
  // The model whose weights model.init_from has, if it is known.
  std::optional<geometry::ModelConfig> init_model;
};

// Sets every key: the model of model.init_from, or the sizes of the flavor
// (given keys take precedence), the value of a -1 that the job alone decides
// (model.n_kv_heads, hidden_dim, vocab_size, schedule.total_steps), and
// defaults; then checks keys against each other. Keys that depend on the
// cluster stay -1 (data-, tensor- and pipeline-parallel degree, train.threads,
// elastic.max_slots, elastic.hang_after_s). Resolving a resolved job changes
// nothing.
Result<pb::Job> resolve(const pb::Job& job, const DataInfo& data);

// The resolved job without what resolve() derived from train.steps (the length
// of the schedule, the default warm-up), so that they follow another
// train.steps.
pb::Job without_derived(pb::Job resolved);

// A key whose value differs between two jobs; values as in a job file.
struct Difference {
  std::string key;  // "train.steps"
  std::string first, second;
};
std::vector<Difference> differences(const pb::Job& first,
                                    const pb::Job& second);
// "train.steps 50 -> 100, train.seed 1 -> 2"; "" if nothing differs.
std::string changes_text(const pb::Job& first, const pb::Job& second);

// Every key ("train.steps") with its value as TOML writes it.
std::vector<std::pair<std::string, std::string>> settings(const pb::Job& job);

// Whether [model] has every key that resolve() takes from DataInfo::init_model.
bool has_every_size(const pb::Model& model);

// Where the initial weights are: model.init_checkpoint, or model.init_from
// where that names one model; "" if they are random.
const std::string& init_path(const pb::Model& model);

// The model of a resolved job.
geometry::ModelConfig model_config(const pb::Job& resolved);
// Their product, with 1 for a degree that is to be chosen. It fits: three
// degrees are at most 1,024, that of dp 65,536.
int64_t ranks_of_degrees(const pb::Parallel& parallel);

// The job as TOML, with every key; parse_job() of it returns the same message
// if the job is resolved.
std::string to_toml(const pb::Job& job);
// Whether a text begins as that does, so that no person has written it.
bool is_written_by_run(std::string_view text);

// The output of `remesh job defaults`: every key, commented out, with its
// default, help text, bounds and allowed values.
std::string commented_example();

}  // namespace remesh::jobfile
