#include "coordinator/ctl/descriptions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/huggingface/config.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/rundir/job_files.h"
#include "parallel/geometry/family.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/local_cluster.h"
#include "proto/base/file_system.h"
#include "proto/base/json_reader.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

// Models are often named with the longest sequences that they can be used on,
// not with those that they are trained on.
constexpr int64_t kMostDefaultSeq = 8192;

bool is_file(const std::string& text) {
  std::error_code ec;
  return text.find('/') != std::string::npos || text.ends_with(".toml") ||
         text.ends_with(".json") || fs::is_regular_file(text, ec);
}

// Descriptions are installed in share/remesh, beside the programs' bin; a build
// tree has a link there.
fs::path folder_of(const std::string& kind) {
  std::error_code ec;
  const fs::path self = fs::read_symlink("/proc/self/exe", ec);
  return self.parent_path().parent_path() / "share" / "remesh" / kind;
}

Result<ModelChoice> from_description(const std::string& path) {
  pb::ModelFile file;
  RETURN_IF_ERROR(jobfile::load_description(path, &file));
  ASSIGN_OR_RETURN(auto model, planner::model_of(file).with_context(path));
  return ModelChoice{.name = fs::path(path).stem().string(),
                     .model = std::move(model),
                     .seq_len = file.model().seq_len()};
}

Result<ModelChoice> from_job(const std::string& path,
                             const std::vector<std::string>& set) {
  ASSIGN_OR_RETURN(const pb::Job job, rundir::load_resolved({path, set}));
  const auto shape = core::shape_of(job);
  if (!shape)
    return invalid_argument(path + ": the [model] section is incomplete");
  if (shape->model.lora.rank > 0)
    return invalid_argument(
        path +
        ": lora.rank: plans for clusters are for training all weights; "
        "add --set lora.rank=0, or plan without --cluster");
  return ModelChoice{.name = fs::path(path).filename().string(),
                     .model = shape->model,
                     .seq_len = shape->T,
                     .global_batch = shape->B * shape->microbatches};
}

// A description has no section but [model].
bool is_job(const std::string& toml) {
  std::istringstream lines(toml);
  for (std::string line; std::getline(lines, line);) {
    std::erase_if(line, [](unsigned char c) { return std::isspace(c) != 0; });
    if (line.starts_with('[') && !line.starts_with("[model]")) return true;
  }
  return false;
}

// Those that are planned for and that checkpoint/huggingface does not read,
// with the defaults of transformers where the file does not say.
struct HfFamily {
  const char* model_type;
  bool gated, tied;
  int64_t head_dim = 0;  // 0: the hidden size over the heads
};
constexpr HfFamily kHfFamilies[] = {
    {"olmo", true, false},       {"olmo2", true, false},
    {"granite", true, false},    {"gemma", true, true, 256},
    {"gemma2", true, true, 256}, {"gemma3_text", true, true, 256},
    {"cohere", true, true},      {"cohere2", true, true},
    {"glm4", true, false, 128},  {"smollm3", true, true},
    {"stablelm", true, false},   {"internlm2", true, false},
    {"gpt2", false, true},       {"gpt_neox", false, false},
    {"gptj", false, false},      {"gpt_bigcode", false, true},
    {"opt", false, true},        {"bloom", false, true},
    {"mpt", false, true},        {"falcon", false, true},
    {"phi", false, false},       {"nemotron", false, false},
    {"starcoder2", false, true}};

Result<HfFamily> hf_family(JsonReader& c, const std::string& type) {
  std::vector<std::string> known = {geometry::family_names()};
  for (const HfFamily& f : kHfFamilies) {
    if (type == f.model_type) return f;
    known.emplace_back(f.model_type);
  }
  c.refuse("model_type", "one of " + join(known));
  return c.problem();
}

}  // namespace

Result<ModelChoice> parse_hf_config(const std::string& text,
                                    const std::string& name) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object())
    return invalid_argument(name + ": is not a JSON object");
  JsonReader c(json, name);
  const std::string type = c.text("model_type", "");
  if (geometry::find_family(type) != nullptr) {
    ASSIGN_OR_RETURN(const huggingface::Config hf,
                     huggingface::parse_shape(text, name));
    return ModelChoice{.name = name,
                       .model = hf.model,
                       .seq_len = std::min(hf.max_position, kMostDefaultSeq)};
  }
  ASSIGN_OR_RETURN(const HfFamily family, hf_family(c, type));
  pb::ModelFile file;
  pb::ModelShape& m = *file.mutable_model();
  m.set_arch(family.gated ? "llama" : "gpt");
  m.set_dim(
      c.integer(c.any_of({"hidden_size", "n_embd", "n_embed", "d_model"}), 0));
  m.set_n_layers(
      c.integer(c.any_of({"num_hidden_layers", "n_layer", "n_layers"}), 0));
  m.set_n_heads(
      c.integer(c.any_of({"num_attention_heads", "n_head", "n_heads"}), 0));
  // Falcon's first models and StarCoder have one, whatever num_kv_heads says.
  const bool one =
      c.flag("multi_query", type == "gpt_bigcode" || type == "falcon") &&
      !c.flag("new_decoder_architecture", false);
  m.set_n_kv_heads(
      one ? 1
          : c.integer(c.any_of({"num_key_value_heads", "num_kv_heads"}),
                      m.n_heads()));
  m.set_hidden_dim(
      c.integer(c.any_of({"intermediate_size", "n_inner", "ffn_dim"}),
                family.gated ? 0 : c.integer("expansion_ratio", 4) * m.dim()));
  m.set_vocab_size(c.integer("vocab_size", 0));
  m.set_tie_embeddings(c.flag("tie_word_embeddings", family.tied));
  const int64_t seq =
      c.integer(c.any_of({"max_position_embeddings", "n_positions",
                          "max_seq_len", "seq_length"}),
                2048);
  if (c.find("head_dim") != nullptr || family.head_dim > 0)
    m.set_head_dim(c.integer("head_dim", family.head_dim));
  RETURN_IF_ERROR(c.problem());
  ASSIGN_OR_RETURN(auto model, planner::model_of(file).with_context(name));
  return ModelChoice{.name = name,
                     .model = std::move(model),
                     .seq_len = std::min(seq, kMostDefaultSeq)};
}

Result<std::string> description_path(const std::string& kind,
                                     const std::string& name,
                                     const std::string& alternatives) {
  if (is_file(name)) {
    if (!path_exists(name)) return not_found(name + ": no such file");
    if (is_folder(name))
      return invalid_argument(
          fmt::format("{}: a folder; expected {}", name, alternatives));
    return name;
  }
  const bool is_study = kind == "study";
  const fs::path folder = folder_of(is_study ? "studies" : kind + "s");
  const std::string extension = is_study ? ".json" : ".toml";
  std::vector<std::string> known;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end;
       it.increment(ec))
    if (it->path().extension() == extension)
      known.push_back(it->path().stem().string());
  if (ec)
    return not_found(fmt::format("{}: {}; the descriptions belong there",
                                 folder.string(), ec.message()));
  if (kind == "cluster") {  // measured on this machine
    const std::string local = jobfile::local_cluster_path();
    const bool measured = path_exists(local);
    if (name == "local" && measured) return local;
    if (name == "local")
      return not_found("nothing has been measured: run `remesh plan measure`");
    if (measured) known.emplace_back("local");
  }
  std::sort(known.begin(), known.end());
  if (std::binary_search(known.begin(), known.end(), name))
    return (folder / (name + extension)).string();
  const std::string near = nearest_name(name, known);
  return not_found(fmt::format(
      "unknown {} '{}'{}; known: {}; or give a file: {}", kind, name,
      near.empty() ? "" : fmt::format(", did you mean {}?", near), join(known),
      alternatives));
}

Result<ModelChoice> find_model(const std::string& given,
                               const std::vector<std::string>& set) {
  const auto no_job = [&](Result<ModelChoice> found) -> Result<ModelChoice> {
    if (!found.ok() || set.empty()) return found;
    return invalid_argument(fmt::format(
        "--set {}: changes a job file, and {} is none", set.front(), given));
  };
  if (given == jobfile::kStandardInput)
    return invalid_argument(
        "-: with --cluster, give a file, not the standard input");
  const auto path = description_path(
      "model", given, "a description, a job or a Hugging Face config.json");
  const std::string config = given + "/config.json";
  if (!path.ok() && path_exists(config)) return find_model(config, set);
  RETURN_IF_ERROR(path.status());
  if (!is_file(given)) return no_job(from_description(*path));
  ASSIGN_OR_RETURN(const std::string text, jobfile::read_text(given));
  if (given.ends_with(".json")) return no_job(parse_hf_config(text, given));
  return is_job(text) ? from_job(given, set) : no_job(from_description(given));
}

Result<ClusterChoice> find_cluster(const std::string& given) {
  ASSIGN_OR_RETURN(const std::string path,
                   description_path("cluster", given, "a description"));
  ClusterChoice c{.name = fs::path(path).stem().string(), .cluster = {}};
  RETURN_IF_ERROR(jobfile::load_description(path, &c.cluster));
  return c;
}

}  // namespace remesh::ctl
