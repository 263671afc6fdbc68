// ModelFolder: a model of other programs on disk, opened for reading: that of
// Hugging Face, or one of other_formats.h.
//
//   DIR/config.json
//       model.safetensors               or, without it, for large models,
//       model.safetensors.index.json    which names the file of each tensor
//
//   DIR/params.json                     Meta's
//       consolidated.safetensors
//
//   FILE.bin                            llama2.c's
//
// The files are mapped, and only the elements that are asked for are read, so
// opening a model takes neither time nor memory. They must not change meanwhile
// (proto/base/mapped_file.h).
//
// Threads: any may read.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/file_tensors.h"
#include "checkpoint/huggingface/other_formats.h"
#include "checkpoint/huggingface/safetensors.h"
#include "parallel/geometry/param_table.h"
#include "parallel/geometry/rect.h"
#include "proto/base/file_system.h"
#include "proto/base/mapped_file.h"

namespace remesh::huggingface {

inline constexpr char kConfigName[] = "config.json";
inline constexpr char kWeightsName[] = "model.safetensors";
inline constexpr char kIndexName[] = "model.safetensors.index.json";

inline constexpr char kParamsName[] = "params.json";
inline constexpr char kConsolidatedName[] = "consolidated.safetensors";

// Whether `path` has such a model, as far as names tell.
bool is_model(FileSystem& fs, const std::string& path);
// DIR/config.json.
Result<Config> read_config(FileSystem& fs, const std::string& dir);

class ModelFolder {
 public:
  // Fails, naming file and tensor, with NotFound if a file is missing, Corrupt
  // if one is damaged or the index differs from the files, InvalidArgument if
  // the tensors are not the parameters of the model in config.json. Extra
  // tensors are refused, except rotary frequencies, which are recomputed, and a
  // head that is tied and equal to the embedding.
  static Result<ModelFolder> open(FileSystem& fs, const std::string& path);

  const Config& config() const { return config_; }
  const geometry::ParamTable& table() const { return table_; }

  // Elements of `rect` of parameter `param` (of the table), in fp32: row i to
  // out + i * row_stride. Io if the storage returns an error.
  // REQUIRES: the rectangle is inside the parameter.
  Status read(size_t param, const geometry::Rect& rect, float* out,
              int64_t row_stride) const;
  // What was read is no longer memory of this process (mapped_file.h).
  void release_pages() const {
    for (const MappedFile& file : files_) file.release_pages();
  }

 private:
  explicit ModelFolder(std::string path) : path_(std::move(path)) {}
  Result<std::span<const std::byte>> map(const std::string& path);
  Status load(std::span<const std::byte> bytes) const;
  Status map_file(const std::string& file, Tensors& tensors);
  Status map_files(FileSystem& fs, Tensors& tensors);
  Result<NamedTensors> read_names(FileSystem& fs);
  Status take(const FileTensor& file, const Tensor& tensor);
  Status match(const Tensors& tensors);

  std::string path_;
  Config config_;
  geometry::ParamTable table_;
  std::vector<MappedFile> files_;
  std::vector<Tensor> params_;  // in the order of the table
  bool interleaved_ = false;    // rows of queries and keys (other_formats.h)
};

}  // namespace remesh::huggingface
