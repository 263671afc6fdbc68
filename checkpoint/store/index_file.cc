#include "checkpoint/store/index_file.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sparse_file.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

// The slices of every parameter; the dataset is the slice's name.
std::map<std::string, std::vector<VirtualPart>> parts_by_param(
    const pb::Manifest& m) {
  std::map<std::string, std::vector<VirtualPart>> parts;
  for (const pb::ShardFile& shard : m.shards()) {
    const std::vector<std::string> names = slice_names(shard);
    for (size_t i = 0; i < names.size(); ++i) {
      const pb::Slice& slice = shard.slices(static_cast<int>(i));
      parts[slice.param()].push_back({.start = start_of(slice),
                                      .count = count_of(slice),
                                      .file = shard.name(),
                                      .dataset = names[i]});
    }
  }
  return parts;
}

// For readers that have only this file.
Status write_description(Hdf5Writer& w, const pb::Manifest& m) {
  const pb::ModelInfo& c = m.model();
  const std::pair<const char*, int64_t> integers[] = {
      {"step", m.step()},
      {"generation", m.generation()},
      {"tokens", m.tokens()},
      {"sequences", m.sequences()},
      {"hidden_size", c.dim()},
      {"num_hidden_layers", c.n_layers()},
      {"num_attention_heads", c.n_heads()},
      {"num_key_value_heads", c.n_kv_heads()},
      {"head_dim", c.head_dim() != 0 ? c.head_dim() : c.dim() / c.n_heads()},
      {"sliding_window", c.sliding_window()},
      {"intermediate_size", c.hidden_dim()},
      {"vocab_size", c.vocab_size()},
      {"tie_word_embeddings", c.tie_embeddings() ? 1 : 0}};
  for (const auto& [name, value] : integers)
    RETURN_IF_ERROR(w.set_attribute(name, std::span(&value, 1)));
  RETURN_IF_ERROR(w.set_attribute("rms_norm_eps", c.norm_eps()));
  RETURN_IF_ERROR(w.set_attribute("rope_theta", c.rope_theta()));
  if (c.rope_scaled()) {
    RETURN_IF_ERROR(w.set_attribute("rope_factor", c.rope_factor()));
    RETURN_IF_ERROR(
        w.set_attribute("rope_low_freq_factor", c.rope_low_freq_factor()));
    RETURN_IF_ERROR(
        w.set_attribute("rope_high_freq_factor", c.rope_high_freq_factor()));
    const int64_t position = c.rope_original_max_position();
    RETURN_IF_ERROR(
        w.set_attribute("rope_original_max_position", std::span(&position, 1)));
  }
  return w.set_attribute("job", m.job());
}

// One parameter in full.
Status write_param(Hdf5Writer& w, size_t tensor,
                   const geometry::ParamSpec& spec,
                   std::vector<VirtualPart> parts) {
  const std::string path = dataset_path(tensor, spec.name);
  for (VirtualPart& part : parts)
    part.dataset = dataset_path(tensor, part.dataset);
  return w.write_virtual(path, spec.shape, parts);
}

}  // namespace

Result<std::string> index_bytes(const pb::Manifest& m,
                                const ParamTable& table) {
  ASSIGN_OR_RETURN(
      const auto w,
      Hdf5Writer::create(std::make_unique<SparseFile>(), manifest::kIndexName));
  RETURN_IF_ERROR(write_description(*w, m));
  const auto by_param = parts_by_param(m);
  for (size_t t = 0; t < kTensors.size(); ++t) {
    RETURN_IF_ERROR(w->make_group(std::string("/") + kTensors[t]));
    for (const geometry::ParamSpec& spec : table.specs())
      RETURN_IF_ERROR(write_param(*w, t, spec, by_param.at(spec.name)));
  }
  ASSIGN_OR_RETURN(const auto file, w->finish());
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  std::string bytes(size, '\0');
  RETURN_IF_ERROR(
      file->read_at(0, std::as_writable_bytes(std::span(bytes.data(), size))));
  return bytes;
}

Status check_index(FileSystem& fs, const std::string& path,
                   const pb::ShardFile& index) {
  ASSIGN_OR_RETURN(const std::string bytes, read_file(fs, path, index.bytes()));
  if (bytes.size() == index.bytes() && xxh128_text(bytes) == index.xxh128())
    return ok_status();
  return corrupt(fmt::format(
      "{}: {} bytes with xxh128 {}, the manifest says {} with {}", path,
      bytes.size(), xxh128_text(bytes), index.bytes(), index.xxh128()));
}

}  // namespace remesh::store
