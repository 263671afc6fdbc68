#include "checkpoint/huggingface/weight_source.h"

#include <fmt/format.h>

#include <utility>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "proto/base/text.h"

namespace remesh::huggingface {

Result<std::string> find_weights(FileSystem& fs, const std::string& path) {
  if (is_model(fs, path) || fs.exists(path_join(path, manifest::kManifestName)))
    return path;
  ASSIGN_OR_RETURN(const auto found, manifest::scan(fs, path));
  const manifest::Found* newest = manifest::choose_newest_valid(found);
  if (newest != nullptr) return newest->path;
  return not_found(fmt::format(
      "{}: has no model: neither {} of a Hugging Face model, nor {} of one of "
      "Meta's, nor a valid checkpoint",
      path, kConfigName, kParamsName));
}

Result<geometry::ModelConfig> model_of(FileSystem& fs,
                                       const std::string& path) {
  ASSIGN_OR_RETURN(const std::string found, find_weights(fs, path));
  if (is_model(fs, found)) {
    ASSIGN_OR_RETURN(const auto folder, ModelFolder::open(fs, found));
    return folder.config().model;
  }
  ASSIGN_OR_RETURN(const pb::Manifest m, manifest::read_manifest(fs, found));
  ASSIGN_OR_RETURN(const auto model, manifest::model_config(m.model()));
  return model.base();
}

Result<WeightSource> WeightSource::open(FileSystem& fs, const std::string& path,
                                        const std::string& base) {
  WeightSource source(fs);
  ASSIGN_OR_RETURN(source.path_, find_weights(fs, path));
  if (is_model(fs, source.path_)) {
    ASSIGN_OR_RETURN(source.folder_, ModelFolder::open(fs, source.path_));
    source.model_ = source.folder_->config().model;
    return source;
  }
  ASSIGN_OR_RETURN(source.manifest_,
                   manifest::read_checkpoint(fs, source.path_));
  ASSIGN_OR_RETURN(source.model_,
                   manifest::model_config(source.manifest_.model()));
  if (source.model_.lora.rank > 0)
    RETURN_IF_ERROR(
        source.open_base(base.empty() ? source.manifest_.base() : base));
  return source;
}

// Reads the adapters and opens the model at `path`, which they belong to.
Status WeightSource::open_base(const std::string& path) {
  auto base = open(*fs_, path);
  if (!base.ok())
    return base.status().with_context(fmt::format(
        "{}: has adapters alone, and not the model that they belong to",
        path_));
  base_ = std::make_shared<const WeightSource>(std::move(*base));
  Adapters a{.table = geometry::ParamTable::make(model_), .values = {}};
  a.values.resize(static_cast<size_t>(a.table.num_elements()));
  RETURN_IF_ERROR(store::load(*fs_, path_, manifest_, a.table,
                              geometry::whole_pieces(a.table),
                              {.weights = a.values}));
  adapters_ = std::make_shared<const Adapters>(std::move(a));
  model_ = model_.base();
  return ok_status();
}

Status WeightSource::load(const geometry::ParamTable& table,
                          std::span<const geometry::Piece> pieces,
                          std::span<float> weights,
                          const std::function<void()>& tick) const {
  const auto differences = manifest::model_differences(
      manifest::model_info(model_), manifest::model_info(table.config()));
  if (!differences.empty())
    return invalid_argument(fmt::format("{}: holds another model: {}", path_,
                                        join(differences, "; ")));
  if (base_ != nullptr) {
    RETURN_IF_ERROR(base_->load(table, pieces, weights, tick));
    add_adapters(*adapters_, table, pieces, weights);
    return ok_status();
  }
  if (!folder_)
    return store::load(*fs_, path_, manifest_, table, pieces,
                       {.weights = weights});
  for (const geometry::Piece& p : pieces) {
    folder_->read(p.param, p.rect, weights.data() + p.at, p.row_stride);
    tick();
  }
  return ok_status();
}

}  // namespace remesh::huggingface
