#include "checkpoint/huggingface/model_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/huggingface/json.h"

namespace remesh::huggingface {
namespace {

constexpr uint64_t kMaxConfigBytes = uint64_t{1} << 20;
constexpr uint64_t kMaxIndexBytes = 100'000'000;
constexpr char kLlama2cSuffix[] = ".bin";

// By tensor, the file that holds it.
using WeightMap = std::map<std::string, std::string>;

bool is_plain_name(const std::string& file) {
  return file.ends_with(".safetensors") &&
         file.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
}

Result<WeightMap> parse_index(const std::string& text,
                              const std::string& name) {
  ASSIGN_OR_RETURN(const Json json, parse_json(text, name));
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty())
    return corrupt(name + ": has no weight_map from tensors to files");
  WeightMap files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !is_plain_name(file.get<std::string>()))
      return corrupt(fmt::format(
          "{}: tensor {}: its file must be a name that ends in .safetensors",
          name, printable(tensor)));
    files[tensor] = file.get<std::string>();
  }
  return files;
}

// Frequencies of the rotary embedding, which older files hold.
bool is_recomputed(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq");
}

std::string text_of(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool same_elements(const Tensor& a, const Tensor& b) {
  return a.dtype_name == b.dtype_name && a.shape == b.shape &&
         std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(),
                    b.bytes.end());
}

}  // namespace

// The bytes of a file, of which those of a usual header are loaded.
Result<std::span<const std::byte>> ModelFolder::map(const std::string& path) {
  constexpr size_t kUsualHeader = 1 << 20;
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::open(path));
  files_.push_back(std::move(mapped));
  const auto bytes = files_.back().bytes();
  RETURN_IF_ERROR(load(bytes.first(std::min(bytes.size(), kUsualHeader))));
  return bytes;
}

// Loads bytes of one of the files (mapped_file.h).
Status ModelFolder::load(std::span<const std::byte> bytes) const {
  for (const MappedFile& file : files_)
    if (const auto all = file.bytes();
        bytes.data() >= all.data() && bytes.data() < all.data() + all.size())
      return file.load(bytes);
  return ok_status();
}

// Maps a file and adds its tensors.
Status ModelFolder::map_file(const std::string& file, Tensors& tensors) {
  const std::string path = path_join(path_, file);
  ASSIGN_OR_RETURN(const auto bytes, map(path));
  ASSIGN_OR_RETURN(Tensors found, parse_safetensors(bytes, path));
  for (auto& [name, tensor] : found)
    if (!tensors.emplace(name, std::move(tensor)).second)
      return corrupt(fmt::format("{}: tensor {} is in another file too", path,
                                 printable(name)));
  return ok_status();
}

// The only file, or every file, which must have the tensors that the index
// says.
Status ModelFolder::map_files(FileSystem& fs, Tensors& tensors) {
  if (fs.exists(path_join(path_, kWeightsName)))
    return map_file(kWeightsName, tensors);
  const std::string index = path_join(path_, kIndexName);
  if (!fs.exists(index))
    return not_found(fmt::format(
        "{}: has neither {} nor {}; files of PyTorch (.bin) are programs and "
        "are not read",
        path_, kWeightsName, kIndexName));
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(fs, index, kMaxIndexBytes));
  ASSIGN_OR_RETURN(const WeightMap map, parse_index(text, index));
  std::set<std::string> names;
  for (const auto& [tensor, file] : map) names.insert(file);
  for (const std::string& file : names) {
    Tensors here;
    RETURN_IF_ERROR(map_file(file, here));
    for (const auto& [tensor, of] : map)
      if (of == file && !here.contains(tensor))
        return corrupt(fmt::format("{}: tensor {}: is not in {}", index,
                                   printable(tensor), printable(file)));
    for (auto& [name, tensor] : here) {
      const auto it = map.find(name);
      if (it == map.end() || it->second != file)
        return corrupt(fmt::format("{}: does not name tensor {} of {}", index,
                                   printable(name), printable(file)));
      tensors.emplace(name, std::move(tensor));
    }
  }
  return ok_status();
}

// Takes the parameters that a tensor holds from it.
Status ModelFolder::take(const FileTensor& file, const Tensor& tensor) {
  const std::string name = printable(file.tensor.name);
  if (tensor.shape != file.tensor.shape)
    return invalid_argument(
        fmt::format("{}: tensor {} has shape {}; the model's is {}", path_,
                    name, text_of(tensor.shape), text_of(file.tensor.shape)));
  if (tensor.dtype == Dtype::kOther)
    return invalid_argument(
        fmt::format("{}: tensor {} has dtype {}; must be F32, BF16 or F16",
                    path_, name, tensor.dtype_name));
  size_t at = 0;
  for (size_t p = file.first; p < file.last; ++p) {
    Tensor part = tensor;
    part.shape = table_[p].shape;
    part.bytes = tensor.bytes.subspan(
        at, static_cast<size_t>(part.numel()) * dtype_size(part.dtype));
    at += part.bytes.size();
    params_.push_back(std::move(part));
  }
  return ok_status();
}

// Takes the parameters from the tensors.
Status ModelFolder::match(const Tensors& tensors) {
  std::set<std::string> known;
  for (const FileTensor& file : file_tensors(table_)) {
    const auto it = tensors.find(file.tensor.name);
    if (it == tensors.end())
      return invalid_argument(fmt::format("{}: tensor {} is missing", path_,
                                          printable(file.tensor.name)));
    RETURN_IF_ERROR(take(file, it->second));
    known.insert(file.tensor.name);
  }
  for (const auto& [name, tensor] : tensors) {
    if (known.contains(name) || is_recomputed(name)) continue;
    const bool head = name == "lm_head.weight";
    const Tensor& embedding =
        params_[static_cast<size_t>(table_.find(geometry::Role::kEmbedding))];
    if (head) {
      RETURN_IF_ERROR(load(tensor.bytes));
      RETURN_IF_ERROR(load(embedding.bytes));
      if (same_elements(tensor, embedding)) continue;
    }
    return invalid_argument(fmt::format(
        "{}: tensor {} {}", path_, printable(name),
        head ? "differs from the embedding, but tie_word_embeddings is true"
             : fmt::format("is no parameter of a {} model",
                           config_.model.arch)));
  }
  return ok_status();
}

bool is_model(FileSystem& fs, const std::string& path) {
  return fs.exists(path_join(path, kConfigName)) ||
         fs.exists(path_join(path, kParamsName)) ||
         (path.ends_with(kLlama2cSuffix) && fs.exists(path));
}

Result<Config> read_config(FileSystem& fs, const std::string& dir) {
  const std::string path = path_join(dir, kConfigName);
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(fs, path, kMaxConfigBytes));
  return parse_config(text, path);
}

// The tensors by name, with interleaved_ set.
Result<NamedTensors> ModelFolder::read_names(FileSystem& fs) {
  if (fs.exists(path_join(path_, kConfigName))) {
    NamedTensors out;
    ASSIGN_OR_RETURN(out.config, read_config(fs, path_));
    RETURN_IF_ERROR(map_files(fs, out.tensors));
    return out;
  }
  interleaved_ = true;
  if (path_.ends_with(kLlama2cSuffix)) {
    ASSIGN_OR_RETURN(const auto bytes, map(path_));
    return parse_llama2c(bytes, path_);
  }
  const std::string params = path_join(path_, kParamsName);
  if (!fs.exists(params))
    return not_found(fmt::format("{}: has neither {} nor {}", path_,
                                 kConfigName, kParamsName));
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(fs, params, kMaxConfigBytes));
  if (!fs.exists(path_join(path_, kConsolidatedName)))
    return not_found(fmt::format(
        "{}: has no {}; files of PyTorch (.pth) are programs and are not read",
        path_, kConsolidatedName));
  Tensors tensors;
  RETURN_IF_ERROR(map_file(kConsolidatedName, tensors));
  return parse_consolidated(text, tensors, params);
}

Result<ModelFolder> ModelFolder::open(FileSystem& fs, const std::string& path) {
  ModelFolder folder(path);
  ASSIGN_OR_RETURN(NamedTensors names, folder.read_names(fs));
  folder.config_ = std::move(names.config);
  folder.table_ = geometry::ParamTable::make(folder.config_.model);
  RETURN_IF_ERROR(folder.match(names.tensors));
  return folder;
}

Status ModelFolder::read(size_t param, const geometry::Rect& rect, float* out,
                         int64_t row_stride) const {
  const Tensor& t = params_[param];
  const geometry::Role role = table_[param].role;
  const bool pairs = interleaved_ && (role == geometry::Role::kQuery ||
                                      role == geometry::Role::kKey);
  const int64_t cols = t.shape.back();
  const size_t size = dtype_size(t.dtype);
  const auto load_elements = [&](int64_t first, int64_t count) {
    return load(t.bytes.subspan(static_cast<size_t>(first) * size,
                                static_cast<size_t>(count) * size));
  };
  const bool contiguous = !pairs && rect.cols == cols;
  if (contiguous) RETURN_IF_ERROR(load_elements(rect.row * cols, rect.numel()));
  for (int64_t r = 0; r < rect.rows; ++r) {
    const int64_t row =
        pairs ? interleaved_row(rect.row + r, config_.model.head_dim())
              : rect.row + r;
    const int64_t first = row * cols + rect.col;
    if (!contiguous) RETURN_IF_ERROR(load_elements(first, rect.cols));
    read_elements(t, first,
                  {out + r * row_stride, static_cast<size_t>(rect.cols)});
  }
  return ok_status();
}

}  // namespace remesh::huggingface
