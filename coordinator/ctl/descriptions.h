// The models and clusters that `remesh plan` can be given: by the name of a
// description that is installed with the program, or as a file.
#pragma once

#include <string>
#include <vector>

#include "parallel/geometry/model_config.h"
#include "parallel/planner/description.h"
#include "proto/base/status.h"

namespace remesh::ctl {

struct ModelChoice {
  std::string name;
  geometry::ModelConfig model;
  int64_t seq_len = 0;
  int64_t global_batch = 0;  // sequences; 0: the file does not say
};

struct ClusterChoice {
  std::string name;
  pb::Cluster cluster;
};

// The file of the description (`kind`: model, cluster or study) that is
// installed under that name, or `name` itself if it looks like a file. Fails
// with NotFound, naming the known ones and `alternatives`, or InvalidArgument
// if it is a folder.
Result<std::string> description_path(const std::string& kind,
                                     const std::string& name,
                                     const std::string& alternatives);

// A name, a description (proto/cluster.proto), a job file, to which the
// overrides `set` apply, or a Hugging Face config.json. Fails with NotFound,
// naming the known models, or like jobfile::load_description().
Result<ModelChoice> find_model(const std::string& name_or_file,
                               const std::vector<std::string>& set);
// A name or a description.
Result<ClusterChoice> find_cluster(const std::string& name_or_file);

// A config.json. Fails, naming the key, if it is no dense transformer whose
// sizes the planner knows.
Result<ModelChoice> parse_hf_config(const std::string& json,
                                    const std::string& name);

}  // namespace remesh::ctl
