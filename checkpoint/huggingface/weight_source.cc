#include "checkpoint/huggingface/weight_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "checkpoint/manifest/scan.h"
#include "proto/base/text.h"
#include "proto/base/xxh3.h"

namespace remesh::huggingface {

Result<std::string> find_weights(FileSystem& fs, const std::string& path) {
  if (is_model(fs, path) || fs.exists(path_join(path, manifest::kManifestName)))
    return path;
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) {
    ASSIGN_OR_RETURN(const auto found, manifest::scan(fs, path));
    const manifest::Found* newest = manifest::choose_newest_valid(found);
    if (newest != nullptr) return newest->path;
  }
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
  return open_at(fs, path, base, 0);
}

Result<WeightSource> WeightSource::open_at(FileSystem& fs,
                                           const std::string& path,
                                           const std::string& base, int depth) {
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
  ASSIGN_OR_RETURN(source.shards_,
                   store::open_shards(fs, source.path_, source.manifest_));
  if (source.model_.lora.rank > 0)
    RETURN_IF_ERROR(
        source.open_base(base.empty() ? source.manifest_.base() : base, depth));
  return source;
}

// Reads the adapters and opens the model at `path`, which they belong to.
Status WeightSource::open_base(const std::string& path, int depth) {
  constexpr int kMostDepth = 8;
  if (depth == kMostDepth)
    return corrupt(fmt::format(
        "{}: its adapters belong to adapters, and so on, more than {} times",
        path_, kMostDepth));
  ASSIGN_OR_RETURN(
      WeightSource base,
      open_at(*fs_, path, "", depth + 1)
          .with_context(path_ + ": has adapters alone, and not the model that "
                                "they belong to"));
  base_ = std::make_shared<const WeightSource>(std::move(base));
  if (const std::string& print = manifest_.base_fingerprint(); !print.empty())
    RETURN_IF_ERROR(base_->check_base(manifest_.base(), print, [] {})
                        .status()
                        .with_context(path_));
  Adapters a{.table = geometry::ParamTable::make(model_), .values = {}};
  a.values.resize(static_cast<size_t>(a.table.num_elements()));
  RETURN_IF_ERROR(store::load(shards_, path_, manifest_, a.table,
                              geometry::whole_pieces(a.table),
                              {.weights = a.values}));
  adapters_ = std::make_shared<const Adapters>(std::move(a));
  model_ = model_.base();
  return ok_status();
}

namespace {

constexpr int64_t kSampled = 4096, kStretches = 8;

// The values of a parameter that count for a fingerprint: all, or stretches
// of rows from its first to its last element.
std::vector<geometry::Rect> sampled(const geometry::Rect& all) {
  if (all.numel() <= kSampled) return {all};
  const int64_t cols = std::min(all.cols, kSampled / kStretches);
  std::vector<geometry::Rect> out;
  for (int64_t i = 0; i < kStretches; ++i)
    out.push_back({.row = i * (all.rows - 1) / (kStretches - 1),
                   .col = i * (all.cols - cols) / (kStretches - 1),
                   .rows = 1,
                   .cols = cols});
  return out;
}

}  // namespace

Result<std::string> WeightSource::fingerprint(
    const std::function<void()>& tick) const {
  const auto table = geometry::ParamTable::make(model_);
  std::vector<geometry::Piece> pieces;
  int64_t count = 0;
  for (size_t i = 0; i < table.size(); ++i)
    for (const geometry::Rect& r : sampled(geometry::full_rect(table[i]))) {
      pieces.push_back(
          {.param = i, .rect = r, .at = count, .row_stride = r.cols});
      count += r.numel();
    }
  std::vector<float> values(static_cast<size_t>(count));
  RETURN_IF_ERROR(load(table, pieces, values, tick));
  Xxh3Stream hash;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const geometry::Piece& p = pieces[i];
    if (i == 0 || p.param != pieces[i - 1].param) {
      const geometry::ParamSpec& s = table[p.param];
      const std::string text =
          fmt::format("{} {}\n", s.name, fmt::join(s.shape, " "));
      hash.add(text.data(), text.size());
    }
    hash.add(values.data() + p.at,
             static_cast<size_t>(p.rect.numel()) * sizeof(float));
  }
  return hex(hash.digest_128());
}

Result<std::string> WeightSource::check_base(
    const std::string& place, const std::string& expected,
    const std::function<void()>& tick) const {
  ASSIGN_OR_RETURN(const std::string here, fingerprint(tick));
  if (expected.empty() || here == expected) return here;
  return corrupt(fmt::format(
      "{}: its weights are not those of the model that the adapters belong to, "
      "which was at {} (fingerprint {}, here {}); put that model back. `remesh "
      "model export --base` takes it from another place",
      path_, place, expected, here));
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
    return store::load(shards_, path_, manifest_, table, pieces,
                       {.weights = weights});
  // In bands of rows, because a large piece of slow storage takes minutes, and
  // so that the weights are not in memory twice, here and as pages of the file.
  constexpr int64_t kBand = 4 << 20;  // elements
  for (const geometry::Piece& p : pieces) {
    const int64_t rows =
        std::max<int64_t>(1, kBand / std::max<int64_t>(1, p.rect.cols));
    for (int64_t r = 0; r < p.rect.rows; r += rows) {
      geometry::Rect band = p.rect;
      band.row += r;
      band.rows = std::min(rows, p.rect.rows - r);
      RETURN_IF_ERROR(folder_->read(p.param, band,
                                    weights.data() + p.at + r * p.row_stride,
                                    p.row_stride));
      tick();
      folder_->release_pages();
    }
  }
  return ok_status();
}

}  // namespace remesh::huggingface
