#include "checkpoint/huggingface/transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/huggingface/adapters.h"
#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/scan.h"
#include "proto/base/text.h"
#include "proto/base/version.h"

namespace remesh::huggingface {
namespace {

using geometry::ParamTable;
using geometry::Piece;

constexpr int64_t kBlockElements = int64_t{1} << 26;
constexpr uint64_t kMaxCopiedBytes = uint64_t{1} << 30;
constexpr char kGenerationName[] = "generation_config.json";

// Complete rows of consecutive parameters, packed into one vector in the order
// of the table, which is also the order of the elements in a file.
struct Block {
  std::vector<Piece> pieces;
  int64_t elements = 0;
};

// Parameters [first, last) in blocks of at most kBlockElements, or one row.
std::vector<Block> blocks_of(const ParamTable& table, size_t first,
                             size_t last) {
  std::vector<Block> blocks(1);
  for (size_t p = first; p < last; ++p) {
    const geometry::Rect all = geometry::full_rect(table[p]);
    for (int64_t row = 0; row < all.rows;) {
      const int64_t room = (kBlockElements - blocks.back().elements) / all.cols;
      if (room == 0 && blocks.back().elements > 0) {
        blocks.emplace_back();
        continue;
      }
      const int64_t rows = std::min(std::max<int64_t>(1, room), all.rows - row);
      Block& b = blocks.back();
      b.pieces.push_back({.param = p,
                          .rect = {row, 0, rows, all.cols},
                          .at = b.elements,
                          .row_stride = all.cols});
      b.elements += rows * all.cols;
      row += rows;
    }
  }
  return blocks;
}

Status check_unused(FileSystem& fs, const std::string& out) {
  if (!fs.exists(out)) return ok_status();
  ASSIGN_OR_RETURN(const auto names, fs.list(out));
  return names.empty()
             ? ok_status()
             : already_exists(out + ": is not empty; give a new folder");
}

// Has `write` fill a folder beside `out` that becomes `out` once it is
// complete.
template <typename Write>
Status write_new_folder(FileSystem& fs, const std::string& out, Write write) {
  RETURN_IF_ERROR(check_unused(fs, out));
  const std::string tmp = temporary_path(fs, out);
  RETURN_IF_ERROR(fs.create_dirs(tmp));
  Status status = write(tmp);
  if (status.ok()) status = fs.rename(tmp, out);
  if (status.ok()) return fs.sync_dir(parent_path(out));
  (void)remove_all(fs, tmp);
  return status;
}

// The number of shards.
Result<int> write_shards(FileSystem& fs, const ModelFolder& model,
                         const std::string& out, const store::SaveId& id,
                         const Progress& progress) {
  const ParamTable& table = model.table();
  const std::vector<Block> blocks = blocks_of(table, 0, table.size());
  std::vector<float> values, zeros;
  int64_t done = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& b = blocks[i];
    values.resize(static_cast<size_t>(b.elements));
    zeros.resize(values.size());
    for (const Piece& p : b.pieces)
      RETURN_IF_ERROR(
          model.read(p.param, p.rect, values.data() + p.at, p.row_stride));
    model.release_pages();
    RETURN_IF_ERROR(
        store::write_shard(
            fs, out, id, static_cast<int>(i), table, b.pieces,
            {.weights = values, .exp_avg = zeros, .exp_avg_sq = zeros})
            .status());
    done += b.elements;
    progress(static_cast<uint64_t>(done) * sizeof(float),
             static_cast<uint64_t>(table.num_elements()) * sizeof(float));
  }
  return static_cast<int>(blocks.size());
}

// --- export ---------------------------------------------------------------

struct WeightFile {
  std::string name;
  std::vector<FileTensor> tensors;
};

std::vector<WeightFile> files_of(const ParamTable& table,
                                 const ExportOptions& o) {
  std::vector<WeightFile> files(1);
  uint64_t bytes = 0;
  for (FileTensor& t : file_tensors(table)) {
    uint64_t more = 0;
    for (size_t p = t.first; p < t.last; ++p)
      more += static_cast<uint64_t>(table[p].numel()) * dtype_size(o.dtype);
    if (bytes > 0 && bytes + more > o.shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += more;
    files.back().tensors.push_back(std::move(t));
  }
  for (size_t i = 0; i < files.size(); ++i)
    files[i].name = files.size() == 1
                        ? kWeightsName
                        : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1,
                                      files.size());
  return files;
}

std::string index_json(const std::vector<WeightFile>& files, uint64_t bytes) {
  nlohmann::ordered_json map;
  for (const WeightFile& f : files)
    for (const FileTensor& t : f.tensors) map[t.tensor.name] = f.name;
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}},
                                {"weight_map", map}}
             .dump(2) +
         "\n";
}

// What the export reads and writes.
struct Export {
  FileSystem& fs;
  const WeightSource& source;
  const pb::Manifest& manifest;
  const ParamTable& table;
  const std::string& dir;
  const ExportOptions& options;
  const Progress& progress;
  uint64_t total = 0, done = 0;  // bytes of weights
};

Status write_weights(Export& e, const WeightFile& file) {
  const std::string path = path_join(e.dir, file.name);
  ASSIGN_OR_RETURN(const auto out, e.fs.create_streamed(path));
  std::vector<TensorShape> shapes;
  for (const FileTensor& t : file.tensors) shapes.push_back(t.tensor);
  const std::string header = safetensors_header(shapes, e.options.dtype);
  RETURN_IF_ERROR(out->write_at(0, std::as_bytes(std::span(header))));
  uint64_t at = header.size();
  std::vector<float> values;
  std::vector<std::byte> bytes;
  for (const Block& b : blocks_of(e.table, file.tensors.front().first,
                                  file.tensors.back().last)) {
    values.resize(static_cast<size_t>(b.elements));
    bytes.resize(values.size() * dtype_size(e.options.dtype));
    RETURN_IF_ERROR(e.source.load(e.table, b.pieces, values, [] {}));
    for (const Piece& p : b.pieces)
      RETURN_IF_ERROR(check_range(
          e.options.dtype,
          std::span(values).subspan(static_cast<size_t>(p.at),
                                    static_cast<size_t>(p.rect.numel())),
          e.table[p.param].name));
    write_elements(e.options.dtype, values, bytes);
    RETURN_IF_ERROR(out->write_at(at, bytes));
    at += bytes.size();
    e.done += bytes.size();
    e.progress(e.done, e.total);
  }
  RETURN_IF_ERROR(out->sync());
  return out->close();
}

// The files that describe text, unchanged.
Status copy_text_files(FileSystem& fs, const std::string& from,
                       const std::string& to) {
  const auto copy = [&](const std::string& name) -> Status {
    ASSIGN_OR_RETURN(const std::string text,
                     read_file(fs, path_join(from, name), kMaxCopiedBytes));
    return write_file(fs, path_join(to, name), text);
  };
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "chat_template.jinja", kGenerationName})
    if (fs.exists(path_join(from, name))) RETURN_IF_ERROR(copy(name));
  const std::string more = "additional_chat_templates";
  if (!fs.exists(path_join(from, more))) return ok_status();
  ASSIGN_OR_RETURN(const auto names, fs.list(path_join(from, more)));
  RETURN_IF_ERROR(fs.create_dirs(path_join(to, more)));
  for (const std::string& name : names)
    if (name.ends_with(".jinja")) RETURN_IF_ERROR(copy(path_join(more, name)));
  return fs.sync_dir(path_join(to, more));
}

// As transformers makes it of a config.json, unless there is one.
Status write_generation_config(FileSystem& fs, const Config& config,
                               const std::string& dir) {
  const std::string path = path_join(dir, kGenerationName);
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  for (const auto& [key, ids] : token_ids(config))
    if (!ids.empty()) json[key] = nlohmann::ordered_json::parse(ids);
  if (json.size() == 1 || fs.exists(path)) return ok_status();
  return write_file(fs, path, json.dump(2) + "\n");
}

Status write_folder(Export& e, const std::vector<WeightFile>& files) {
  Config config;
  if (e.manifest.seq_len() > 0) config.max_position = e.manifest.seq_len();
  if (const std::string& like = e.options.like; !like.empty()) {
    ASSIGN_OR_RETURN(config, config_like(e.fs, like, e.table.config()));
    RETURN_IF_ERROR(copy_text_files(e.fs, like, e.dir));
    RETURN_IF_ERROR(write_generation_config(e.fs, config, e.dir));
  }
  config.model = e.table.config();
  RETURN_IF_ERROR(write_file(e.fs, path_join(e.dir, kConfigName),
                             config_json(config, e.options.dtype)));
  for (const WeightFile& f : files) RETURN_IF_ERROR(write_weights(e, f));
  if (files.size() > 1)
    RETURN_IF_ERROR(write_file(e.fs, path_join(e.dir, kIndexName),
                               index_json(files, e.total)));
  return e.fs.sync_dir(e.dir);
}

Result<Exported> export_adapters(FileSystem& fs, const WeightSource& source,
                                 const pb::Manifest& manifest,
                                 const std::string& out,
                                 const ExportOptions& options) {
  const Adapters* const adapters = source.adapters();
  if (adapters == nullptr)
    return invalid_argument(
        "the checkpoint has no adapters: it holds the whole model");
  Exported done{.model = source.model(),
                .step = manifest.step(),
                .parameters = adapters->table.num_elements(),
                .files = 1};
  RETURN_IF_ERROR(
      write_new_folder(fs, out, [&](const std::string& tmp) -> Status {
        ASSIGN_OR_RETURN(
            done.bytes,
            write_peft(fs, *adapters,
                       options.base.empty() ? manifest.base() : options.base,
                       options.dtype, tmp));
        if (!options.like.empty())
          RETURN_IF_ERROR(copy_text_files(fs, options.like, tmp));
        return fs.sync_dir(tmp);
      }));
  return done;
}

}  // namespace

Result<store::CommitResult> import_model(FileSystem& fs,
                                         const ModelFolder& model,
                                         const std::string& out,
                                         const Progress& progress) {
  pb::Manifest manifest;
  manifest.set_job(kImportJob);
  *manifest.mutable_model() = manifest::model_info(model.table().config());
  manifest.set_code_version(version());
  store::CommitResult done;
  RETURN_IF_ERROR(
      write_new_folder(fs, out, [&](const std::string& tmp) -> Status {
        ASSIGN_OR_RETURN(const int shards,
                         write_shards(fs, model, tmp, {}, progress));
        ASSIGN_OR_RETURN(done, store::commit(fs, tmp, std::move(manifest),
                                             shards, model.table(), {}));
        return ok_status();
      }));
  done.path = path_join(out, manifest::step_name(0));
  return done;
}

Result<Config> config_like(FileSystem& fs, const std::string& like,
                           const geometry::ModelConfig& model) {
  ASSIGN_OR_RETURN(Config config, read_config(fs, like));
  std::vector<std::string> differences;
  const auto compare = [&](const char* key, const auto& there,
                           const auto& here) {
    if (there != here)
      differences.push_back(fmt::format("{} is {}, here {}", key, there, here));
  };
  compare("model_type", config.model.arch, model.arch);
  compare("hidden_size", config.model.dim, model.dim);
  compare("num_hidden_layers", config.model.n_layers, model.n_layers);
  compare("vocab_size", config.model.vocab_size, model.vocab_size);
  if (differences.empty()) return config;
  return invalid_argument(fmt::format("{}: is of another model: {}",
                                      path_join(like, kConfigName),
                                      join(differences, "; ")));
}

Result<Exported> export_model(FileSystem& fs, const std::string& checkpoint,
                              const std::string& out,
                              const ExportOptions& options,
                              const Progress& progress) {
  ASSIGN_OR_RETURN(const pb::Manifest manifest,
                   manifest::read_checkpoint(fs, checkpoint));
  ASSIGN_OR_RETURN(const WeightSource source,
                   WeightSource::open(fs, checkpoint, options.base));
  if (options.adapters)
    return export_adapters(fs, source, manifest, out, options);
  const ParamTable table = ParamTable::make(source.model());
  const std::vector<WeightFile> files = files_of(table, options);
  const uint64_t bytes =
      static_cast<uint64_t>(table.num_elements()) * dtype_size(options.dtype);
  RETURN_IF_ERROR(write_new_folder(fs, out, [&](const std::string& tmp) {
    Export e{.fs = fs,
             .source = source,
             .manifest = manifest,
             .table = table,
             .dir = tmp,
             .options = options,
             .progress = progress,
             .total = bytes};
    return write_folder(e, files);
  }));
  return Exported{.model = source.model(),
                  .step = manifest.step(),
                  .parameters = table.num_elements(),
                  .bytes = bytes,
                  .files = static_cast<int>(files.size())};
}

}  // namespace remesh::huggingface
