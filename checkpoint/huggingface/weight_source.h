// WeightSource: the weights of a model, in a Hugging Face folder or in a
// checkpoint, of any mesh. Only what is asked for is read. Adapters are read as
// a whole, and added to the weights of the model that they belong to.
//
// The files stay open, so that a checkpoint that a run removes meanwhile is
// read to its end. Threads: one at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/huggingface/adapters.h"
#include "checkpoint/huggingface/model_folder.h"
#include "checkpoint/manifest/manifest.h"
#include "checkpoint/store/store.h"
#include "parallel/geometry/slice.h"

namespace remesh::huggingface {

// The model that `path` names: itself if it is that of a ModelFolder or a
// checkpoint; of a folder of checkpoints the newest valid one at this moment.
// NotFound if it is none of these.
Result<std::string> find_weights(FileSystem& fs, const std::string& path);

// The model whose weights `path` has, without reading them, and without
// adapters. Fails like WeightSource::open().
Result<geometry::ModelConfig> model_of(FileSystem& fs, const std::string& path);

class WeightSource {
 public:
  // Opens the model that find_weights() finds at `path`. Fails like that
  // function, ModelFolder::open() or manifest::read_checkpoint(). The base of
  // adapters is where their checkpoint says, or at `base` if that is given, and
  // must have the fingerprint that the checkpoint names (check_base()).
  // `fs` must outlive the source.
  static Result<WeightSource> open(FileSystem& fs, const std::string& path,
                                   const std::string& base = "");

  // 32 hexadecimal digits that are the same for the same weights, in whatever
  // files and types that hold them exactly, and differ for others. Of each
  // parameter up to 4096 values count (checkpoint/FORMAT.md has the places), so
  // that a model of any size takes about a second; training it further, or
  // adding adapters to it, changes most of them. A change of a few rows alone,
  // such as the embeddings of a few tokens, is likely to be missed.
  Result<std::string> fingerprint(const std::function<void()>& tick) const;
  // The fingerprint, if it is `expected`, or that is "". Else Corrupt: these
  // are not the weights that adapters were trained with, which were at `place`.
  Result<std::string> check_base(const std::string& place,
                                 const std::string& expected,
                                 const std::function<void()>& tick) const;

  // Without adapters.
  const geometry::ModelConfig& model() const { return model_; }
  // nullptr if it has none.
  const Adapters* adapters() const { return adapters_.get(); }
  // Fills `pieces`, whose places are in `weights`. InvalidArgument, naming each
  // difference, if the table is of another model than the source's. Calls
  // `tick` on progress that `fs` does not see.
  Status load(const geometry::ParamTable& table,
              std::span<const geometry::Piece> pieces, std::span<float> weights,
              const std::function<void()>& tick) const;

 private:
  explicit WeightSource(FileSystem& fs) : fs_(&fs) {}
  // depth: how many adapters are in between.
  static Result<WeightSource> open_at(FileSystem& fs, const std::string& path,
                                      const std::string& base, int depth);
  Status open_base(const std::string& path, int depth);

  FileSystem* fs_;
  std::string path_;
  geometry::ModelConfig model_;
  std::optional<ModelFolder> folder_;  // else it is a checkpoint
  pb::Manifest manifest_;
  store::OpenShards shards_;
  std::shared_ptr<const Adapters> adapters_;
  std::shared_ptr<const WeightSource> base_;  // of the adapters
};

}  // namespace remesh::huggingface
