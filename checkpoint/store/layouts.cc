#include "checkpoint/store/layouts.h"

#include <map>
#include <utility>

#include "checkpoint/store/hdf5_file.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

// Where the slices of every parameter stand; the dataset's path still lacks
// its tensor.
std::map<std::string, std::vector<VirtualPart>> parts_by_param(
    const pb::Manifest& m) {
  std::map<std::string, std::vector<VirtualPart>> parts;
  for (const pb::ShardFile& shard : m.shards()) {
    const std::vector<std::string> names = slice_names(shard, m.format());
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

// What someone who opens the file alone wants to know.
Status write_facts(Hdf5Writer& w, const pb::Manifest& m) {
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
      {"intermediate_size", c.hidden_dim()},
      {"vocab_size", c.vocab_size()},
      {"tie_word_embeddings", c.tie_embeddings() ? 1 : 0}};
  for (const auto& [name, value] : integers)
    RETURN_IF_ERROR(w.set_attribute("/", name, std::span(&value, 1)));
  RETURN_IF_ERROR(w.set_attribute("/", "rms_norm_eps", c.norm_eps()));
  RETURN_IF_ERROR(w.set_attribute("/", "rope_theta", c.rope_theta()));
  if (c.rope_scaled()) {
    RETURN_IF_ERROR(w.set_attribute("/", "rope_factor", c.rope_factor()));
    RETURN_IF_ERROR(
        w.set_attribute("/", "rope_low_freq_factor", c.rope_low_freq_factor()));
    RETURN_IF_ERROR(w.set_attribute("/", "rope_high_freq_factor",
                                    c.rope_high_freq_factor()));
    const int64_t position = c.rope_original_max_position();
    RETURN_IF_ERROR(w.set_attribute("/", "rope_original_max_position",
                                    std::span(&position, 1)));
  }
  return w.set_attribute("/", "job", m.job());
}

// One parameter as a whole.
Status write_whole(Hdf5Writer& w, size_t tensor,
                   const geometry::ParamSpec& spec,
                   std::vector<VirtualPart> parts) {
  const std::string path = dataset_path(tensor, spec.name);
  for (VirtualPart& part : parts)
    part.dataset = dataset_path(tensor, part.dataset);
  return w.write_virtual(path, spec.shape, parts);
}

Result<SparseFile> make_index(const pb::Manifest& m, const ParamTable& table) {
  ASSIGN_OR_RETURN(
      const auto w,
      Hdf5Writer::create(std::make_unique<SparseFile>(), manifest::kIndexName));
  RETURN_IF_ERROR(write_facts(*w, m));
  const auto by_param = parts_by_param(m);
  for (size_t t = 0; t < kTensors.size(); ++t) {
    RETURN_IF_ERROR(w->make_group(std::string("/") + kTensors[t]));
    for (const geometry::ParamSpec& spec : table.specs())
      RETURN_IF_ERROR(write_whole(*w, t, spec, by_param.at(spec.name)));
  }
  ASSIGN_OR_RETURN(const auto file, w->finish());
  return *static_cast<const SparseFile*>(file.get());
}

// A copy of `from` in which attributes of the file have other values.
Result<std::unique_ptr<File>> changed(
    const SparseFile& from, const std::string& name,
    std::initializer_list<std::pair<const char*, int64_t>> values) {
  ASSIGN_OR_RETURN(const auto w, Hdf5Writer::reopen(
                                     std::make_unique<SparseFile>(from), name));
  for (const auto& [attribute, value] : values)
    RETURN_IF_ERROR(w->change_attribute("/", attribute, value));
  return w->finish();
}

// All that a shard's layout depends on, but for the step.
std::string key_of(const SaveId& id, const ParamTable& table,
                   const pb::ShardFile& shard) {
  pb::Manifest key;
  key.set_generation(id.generation);
  *key.mutable_model() = manifest::model_info(table.config());
  pb::ShardFile& s = *key.add_shards();
  s.set_rank(shard.rank());
  *s.mutable_slices() = shard.slices();
  return key.SerializeAsString();
}

// All that an index shows, but for what changes from step to step.
std::string key_of(const pb::Manifest& m) {
  pb::Manifest key;
  key.set_format(m.format());
  key.set_job(m.job());
  key.set_generation(m.generation());
  *key.mutable_model() = m.model();
  for (const pb::ShardFile& from : m.shards()) {
    pb::ShardFile& shard = *key.add_shards();
    shard.set_name(from.name());
    *shard.mutable_slices() = from.slices();
  }
  return key.SerializeAsString();
}

}  // namespace

Layouts::Layouts() : impl_(std::make_unique<Impl>()) {}
Layouts::~Layouts() = default;

Result<ShardLayout> lay_out(Layouts* layouts, const SaveId& id,
                            const ParamTable& table,
                            const pb::ShardFile& shard) {
  if (layouts == nullptr) return lay_out(id, table, shard);
  Layouts::Impl& known = layouts->impl();
  std::string key = key_of(id, table, shard);
  if (key == known.shard_of) {
    ShardLayout layout{.tensors = known.tensors};
    ASSIGN_OR_RETURN(layout.rest,
                     changed(known.shard, shard.name(), {{"step", id.step}}));
    ASSIGN_OR_RETURN(layout.size, layout.rest->size());
    return layout;
  }
  ASSIGN_OR_RETURN(ShardLayout layout, lay_out(id, table, shard));
  known.shard = *static_cast<const SparseFile*>(layout.rest.get());
  known.tensors = layout.tensors;
  known.shard_of = std::move(key);
  return layout;
}

Result<std::string> index_bytes(Layouts* layouts, const pb::Manifest& m,
                                const ParamTable& table) {
  Layouts own;
  Layouts::Impl& known = (layouts == nullptr ? own : *layouts).impl();
  std::unique_ptr<File> file;
  std::string key = key_of(m);
  if (key == known.index_of) {
    ASSIGN_OR_RETURN(file, changed(known.index, manifest::kIndexName,
                                   {{"step", m.step()},
                                    {"tokens", m.tokens()},
                                    {"sequences", m.sequences()}}));
  } else {
    ASSIGN_OR_RETURN(known.index, make_index(m, table));
    known.index_of = std::move(key);
    file = std::make_unique<SparseFile>(known.index);
  }
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  std::string bytes(size, '\0');
  RETURN_IF_ERROR(
      file->read_at(0, std::as_writable_bytes(std::span(bytes.data(), size))));
  return bytes;
}

}  // namespace remesh::store
