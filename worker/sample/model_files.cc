#include "worker/sample/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/huggingface/transfer.h"
#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/scan.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/json_depth.h"
#include "proto/data/index.h"
#include "proto/rundir/paths.h"
#include "proto/rundir/run_id.h"
#include "worker/tokenizer/tokenizer_json.h"

namespace remesh::sample {
namespace {

namespace files = std::filesystem;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json", "tokenizer.model"};

bool is_file(const std::string& path) {
  std::error_code error;
  return files::is_regular_file(path, error);
}

struct Run {
  std::string path;
  pb::Job job;
};

// The run that the path is, or is a checkpoint of or its folder of checkpoints.
// A model of another program is of none, wherever it is.
Result<std::optional<Run>> run_of(FileSystem& fs, const std::string& path) {
  if (huggingface::is_model(fs, path)) return std::optional<Run>();
  files::path whole = files::absolute(path).lexically_normal();
  if (!whole.has_filename()) whole = whole.parent_path();
  files::path at = whole;
  for (int up = 0; up < 3; ++up, at = at.parent_path()) {
    const std::string file = rundir::job_path(at.string());
    if (!is_file(file)) continue;
    auto job = jobfile::load_job(file);
    if (up == 0 && !job.ok()) return job.status();
    if (!job.ok()) continue;
    const files::path checkpoints =
        rundir::checkpoints_path(at.string(), job->checkpoint().folder());
    if (up == 0 || checkpoints == whole || checkpoints == whole.parent_path())
      return std::optional(Run{at.string(), std::move(*job)});
  }
  return std::optional<Run>();
}

// The identity of the tokenizer of the job's data; "" if it is not known.
std::string tokenizer_of(const pb::Job& job) {
  const auto index = data::read_index(job.data().path());
  return index.ok() ? index->tokenizer : "";
}

// "1" or "[1, 2]".
std::vector<int32_t> token_ids(const std::string& json) {
  const auto v = nlohmann::json::parse(json, nullptr, /*exceptions=*/false);
  std::vector<int32_t> out;
  const auto add = [&](const nlohmann::json& id) {
    if (id.is_number_integer()) out.push_back(id.get<int32_t>());
  };
  if (v.is_array())
    for (const nlohmann::json& id : v) add(id);
  else
    add(v);
  return out;
}

// A file of the folder; null if there is none, or no JSON.
nlohmann::json json_of(FileSystem& fs, const std::string& folder,
                       const char* name) {
  constexpr uint64_t kMost = uint64_t{64} << 20;
  constexpr int kDeepest = 64;
  if (folder.empty()) return nullptr;
  const auto text = read_file(fs, path_join(folder, name), kMost);
  if (!text.ok() || json_is_deeper(*text, kDeepest)) return nullptr;
  return nlohmann::json::parse(*text, nullptr, /*exceptions=*/false);
}

// Whether a template of tokenizer.json puts a special token first.
bool template_begins(const nlohmann::json& processor) {
  if (!processor.is_object()) return false;
  const auto list = [&](const char* key) {
    const auto it = processor.find(key);
    return it != processor.end() && it->is_array() ? *it
                                                   : nlohmann::json::array();
  };
  const nlohmann::json single = list("single"), parts = list("processors");
  return (!single.empty() && single.front().is_object() &&
          single.front().contains("SpecialToken")) ||
         std::any_of(parts.begin(), parts.end(), template_begins);
}

// Whether the tokenizer of that folder puts the first token in front of a text.
bool adds_begin(FileSystem& fs, const std::string& folder) {
  const auto config = json_of(fs, folder, "tokenizer_config.json");
  if (config.is_object())
    if (const auto it = config.find("add_bos_token");
        it != config.end() && it->is_boolean())
      return it->get<bool>();
  const auto tokenizer = json_of(fs, folder, "tokenizer.json");
  return !tokenizer.is_object() || !tokenizer.contains("post_processor") ||
         template_begins(tokenizer["post_processor"]);
}

// The token that begins a text by the files in the tokenizer's folder, or by
// its usual names.
std::vector<int32_t> begin_of_tokenizer(FileSystem& fs, const ModelFiles& m) {
  const auto model = json_of(fs, m.folder, huggingface::kConfigName);
  if (model.is_object())
    return token_ids(model.value("bos_token_id", nlohmann::json()).dump());
  const auto config = json_of(fs, m.folder, "tokenizer_config.json");
  const std::string given =
      tokenizer::token_in_config(config.dump(), "bos_token");
  for (const std::string& name : {given, std::string("<|begin_of_text|>"),
                                  std::string("<s>"), std::string("<bos>")}) {
    std::vector<int32_t> ids;
    if (m.tokenizer->encode(name, {.special = true}, ids).ok() &&
        ids.size() == 1 && m.tokenizer->is_added(ids.front()))
      return ids;
  }
  return {};
}

void take_begin(FileSystem& fs, const std::vector<int32_t>& tokens,
                ModelFiles* out) {
  if (!tokens.empty()) out->begin = {tokens.front()};
  if (adds_begin(fs, out->folder)) out->text_begin = out->begin;
}

// Whether the checkpoint at that path, which names no tokens, is a model of
// another program.
bool is_import(FileSystem& fs, const std::string& path) {
  const auto found = huggingface::find_weights(fs, path);
  if (!found.ok() || huggingface::is_model(fs, *found)) return false;
  const auto m = manifest::read_manifest(fs, *found);
  return m.ok() && m->job() == huggingface::kImportJob;
}

// What the model's own files say, or else those of its tokenizer.
Status take_config(FileSystem& fs, const std::string& path, ModelFiles* out) {
  if (path.empty()) return ok_status();
  if (is_import(fs, path)) take_begin(fs, begin_of_tokenizer(fs, *out), out);
  if (!huggingface::is_model(fs, path)) return ok_status();
  ASSIGN_OR_RETURN(const auto folder, huggingface::ModelFolder::open(fs, path));
  const huggingface::Config& config = folder.config();
  auto begin = token_ids(config.bos_token_id);
  // Meta's params.json names none.
  if (begin.empty() && !fs.exists(path_join(path, huggingface::kConfigName)))
    begin = begin_of_tokenizer(fs, *out);
  take_begin(fs, begin, out);
  for (const int32_t id : token_ids(config.eos_token_id)) out->end.insert(id);
  out->trained_length = config.max_position;
  return ok_status();
}

// Asked first: without a model no tokenizer helps.
Status check_model(FileSystem& fs, const std::string& path) {
  Status found = huggingface::find_weights(fs, path).status();
  if (found.code() != Code::kNotFound) return found;
  return not_found(fmt::format(
      "{}: {}; give a run directory, a checkpoint or a folder of checkpoints, "
      "or a folder of Hugging Face (with {})",
      path,
      is_file(path + "/" + data::kIndexName) ? "is a data set, not a model"
                                             : "has no model",
      huggingface::kConfigName));
}

Result<std::unique_ptr<tokenizer::Tokenizer>> find_tokenizer(
    const ModelChoice& choice, const std::string& trained_with,
    const std::vector<std::string>& folders, std::string* folder_found) {
  if (!choice.tokenizer.empty()) {
    *folder_found =
        choice.tokenizer == "bytes" ? "" : parent_path(choice.tokenizer);
    ASSIGN_OR_RETURN(auto given, tokenizer::open_tokenizer(choice.tokenizer));
    if (!trained_with.empty() && given->id() != trained_with)
      return invalid_argument(fmt::format(
          "--tokenizer {} is '{}', but the model was trained on tokens of '{}'",
          choice.tokenizer, given->id(), trained_with));
    return given;
  }
  if (trained_with == "bytes") return tokenizer::open_tokenizer("bytes");
  Status refused;
  for (const std::string& folder : folders)
    for (const char* name : kTokenizerFiles) {
      const std::string file = fmt::format("{}/{}", folder, name);
      if (folder.empty() || !is_file(file)) continue;
      auto found = tokenizer::open_tokenizer(file);
      // The other file may be of a kind that can be read.
      if (Status s = found.status(); !s.ok()) {
        refused = refused.ok() ? s
                               : Status(refused.code(),
                                        refused.message() + "; " + s.message());
        continue;
      }
      if (!trained_with.empty() && (*found)->id() != trained_with) continue;
      *folder_found = folder;
      return found;
    }
  RETURN_IF_ERROR(refused);
  return not_found(fmt::format(
      "{}: no tokenizer is beside it{}; give one with --tokenizer: {}",
      choice.path,
      trained_with.empty() ? ""
                           : " (it was trained with '" + trained_with + "')",
      tokenizer::kTokenizerHelp));
}

}  // namespace

Status check_vocabulary(const std::vector<int32_t>& tokens,
                        int64_t vocab_size) {
  for (const int32_t t : tokens)
    if (t < 0 || t >= vocab_size)
      return invalid_argument(fmt::format(
          "the tokenizer has token {}, but the model has a vocabulary of {}; "
          "give the model's own tokenizer with --tokenizer",
          t, vocab_size));
  return ok_status();
}

Result<ModelFiles> find_model(FileSystem& fs, const ModelChoice& choice) {
  if (choice.path.empty()) return invalid_argument("MODEL: must not be empty");
  ModelFiles out{.weights = choice.path};
  ASSIGN_OR_RETURN(const auto run, run_of(fs, choice.path));
  std::error_code error;
  const bool is_run = run && files::equivalent(run->path, choice.path, error);
  std::string trained_with, init;
  if (run) {
    const pb::Job& job = run->job;
    trained_with = tokenizer_of(job);
    init = job.model().init_from();
    out.trained_length = job.train().seq_len();
    if (is_run)
      out.weights =
          rundir::checkpoints_path(run->path, job.checkpoint().folder());
    if (is_run && choice.step < 0 && job.elastic().keep_state()) {
      out.run_id = rundir::run_id_of(fs, run->path);
      out.model = jobfile::model_config(job);
      out.base = jobfile::init_path(job.model());
      out.base_fingerprint = job.lora().base_fingerprint();
    }
  }
  if (choice.step >= 0) {
    if (!is_run)
      return invalid_argument(fmt::format("--step {}: {} is no run directory",
                                          choice.step, choice.path));
    const std::string folder = out.weights;
    out.weights = path_join(folder, manifest::step_name(choice.step));
    if (!files::exists(out.weights, error)) {
      ASSIGN_OR_RETURN(const auto found, manifest::scan(fs, folder));
      return manifest::no_such_step(folder, choice.step, found);
    }
  }
  if (!files::exists(out.weights, error) && out.run_id == 0)
    return not_found(is_run ? out.weights + ": there is no checkpoint yet"
                            : choice.path + ": there is no such file");
  // That of a run may be in memory alone.
  if (out.run_id == 0) RETURN_IF_ERROR(check_model(fs, out.weights));
  ASSIGN_OR_RETURN(
      out.tokenizer,
      find_tokenizer(choice, trained_with, {choice.path, init}, &out.folder));
  out.end.insert(out.tokenizer->end_of_text());
  // Those that end a turn of a conversation are only there.
  const auto generation = json_of(fs, out.folder, "generation_config.json");
  if (generation.is_object() && generation.contains("eos_token_id"))
    for (const int32_t id : token_ids(generation["eos_token_id"].dump()))
      out.end.insert(id);
  // A run continues a model, on sequences of its own length.
  RETURN_IF_ERROR(take_config(fs, run ? init : choice.path, &out));
  if (run) out.trained_length = run->job.train().seq_len();
  if (out.begin.empty()) {
    out.begin = {out.tokenizer->end_of_text()};
    if (run) out.text_begin = out.begin;
  }
  return out;
}

}  // namespace remesh::sample
