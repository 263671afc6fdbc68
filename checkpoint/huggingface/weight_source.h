// WeightSource: the weights that a new run starts from, in a Hugging Face
// folder or in a checkpoint, of any mesh. Only what is asked for is read.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/huggingface/model_folder.h"
#include "checkpoint/manifest/manifest.h"
#include "parallel/geometry/slice.h"

namespace remesh::huggingface {

// The model whose weights `path` has, without reading them. Fails like
// WeightSource::open().
Result<geometry::ModelConfig> model_of(FileSystem& fs, const std::string& path);

class WeightSource {
 public:
  // `path`: that of a ModelFolder, a checkpoint, or a folder of checkpoints, of
  // which the newest valid one is taken. NotFound if it is none of these; else
  // fails like ModelFolder::open() or manifest::read_checkpoint(). `fs` must
  // outlive the source.
  static Result<WeightSource> open(FileSystem& fs, const std::string& path);

  const geometry::ModelConfig& model() const { return model_; }
  // Fills `pieces`, whose places are in `weights`. InvalidArgument, naming each
  // difference, if the table is of another model than the source's. Calls
  // `tick` on progress that `fs` does not see.
  Status load(const geometry::ParamTable& table,
              std::span<const geometry::Piece> pieces, std::span<float> weights,
              const std::function<void()>& tick) const;

 private:
  explicit WeightSource(FileSystem& fs) : fs_(&fs) {}

  FileSystem* fs_;
  std::string path_;
  geometry::ModelConfig model_;
  std::optional<ModelFolder> folder_;  // else it is a checkpoint
  pb::Manifest manifest_;
};

}  // namespace remesh::huggingface
