#include <fmt/format.h>

#include <map>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/sparse_file.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;
using manifest::path_join;

// The directory that holds `path`.
std::string parent(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

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

// As a key: all that the index depends on.
std::string shown_by_index(const pb::Manifest& m) {
  pb::Manifest shown;
  shown.set_job(m.job());
  shown.set_step(m.step());
  shown.set_generation(m.generation());
  shown.set_tokens(m.tokens());
  shown.set_sequences(m.sequences());
  *shown.mutable_model() = m.model();
  for (const pb::ShardFile& from : m.shards()) {
    pb::ShardFile& shard = *shown.add_shards();
    shard.set_name(from.name());
    *shard.mutable_slices() = from.slices();
  }
  return shown.SerializeAsString();
}

Status write_index(FileSystem& fs, const std::string& dir, pb::Manifest& m,
                   const ParamTable& table, const Index* ready) {
  Index made;
  if (ready == nullptr || ready->made_of != shown_by_index(m)) {
    ASSIGN_OR_RETURN(made, make_index(m, table));
    ready = &made;
  }
  const std::string& bytes = ready->bytes;
  RETURN_IF_ERROR(
      manifest::write_file(fs, path_join(dir, manifest::kIndexName), bytes));
  m.mutable_index()->set_name(manifest::kIndexName);
  m.mutable_index()->set_bytes(bytes.size());
  m.mutable_index()->set_xxh128(manifest::xxh128_text(bytes));
  return ok_status();
}

Status collect_shards(FileSystem& fs, const std::string& dir, int num_shards,
                      pb::Manifest& m) {
  m.clear_shards();
  for (int rank = 0; rank < num_shards; ++rank) {
    ASSIGN_OR_RETURN(*m.add_shards(), read_sidecar(fs, dir, rank));
    const pb::ShardFile& shard = m.shards(rank);
    ASSIGN_OR_RETURN(const uint64_t bytes,
                     fs.size(path_join(dir, shard.name())));
    if (bytes != shard.bytes())
      return corrupt(fmt::format("{}: {} bytes, {} were written",
                                 path_join(dir, shard.name()), bytes,
                                 shard.bytes()));
  }
  return ok_status();
}

// Ok when every byte that a restore needs is as its manifest says.
Result<pb::Manifest> read_all(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto m, manifest::read_checkpoint(fs, path));
  for (const pb::ShardFile& shard : m.shards()) {
    const std::string file = path_join(path, shard.name());
    if (shard.block_bytes() == 0) {
      RETURN_IF_ERROR(check_whole_file(fs, file, shard));
      continue;
    }
    ASSIGN_OR_RETURN(const auto bad, find_bad_blocks(fs, file, shard));
    if (!bad.empty()) return corrupt(file + ": damaged");
  }
  return m;
}

// Out of the way in one atomic move, then piece by piece.
Status remove_checkpoint(FileSystem& fs, const std::string& folder,
                         int64_t step) {
  const std::string old = path_join(folder, manifest::old_name(step));
  RETURN_IF_ERROR(manifest::remove_all(fs, old));
  RETURN_IF_ERROR(fs.rename(path_join(folder, manifest::step_name(step)), old));
  RETURN_IF_ERROR(fs.sync_dir(folder));
  return manifest::remove_all(fs, old);
}

// Everything after the commit. Goes on after a failure; returns the first.
Status clean_up(FileSystem& fs, const std::string& folder, const SaveId& id,
                const Retention& retention, std::vector<int64_t>& removed) {
  Status first;
  const auto note = [&](const Status& s) {
    if (first.ok() && !s.ok()) first = s;
    return s.ok();
  };
  const auto names = fs.list(folder);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const auto tmp = manifest::parse_tmp_name(name);
    // One of this generation may be a save in progress.
    if ((tmp && tmp->generation < id.generation) || manifest::is_old_name(name))
      note(manifest::remove_all(fs, path_join(folder, name)));
  }
  const auto found = manifest::scan(fs, folder);
  if (!note(found.status())) return first;
  std::vector<int64_t> valid, invalid;
  for (const manifest::Found& f : *found)
    (f.status.ok() ? valid : invalid).push_back(f.step);
  for (const int64_t step : manifest::to_remove(
           valid, invalid, retention.keep_latest_k, retention.keep_every_n)) {
    // What was just saved stays, even below steps that someone left there.
    if (step == id.step) continue;
    if (note(remove_checkpoint(fs, folder, step))) removed.push_back(step);
  }
  note(fs.sync_dir(folder));
  return first;
}

// Moves the finished directory to its final name.
Status publish(FileSystem& fs, const std::string& folder,
               const std::string& tmp, const std::string& final_path,
               int64_t step) {
  if (fs.exists(final_path)) {
    // It is there and not valid (checked before), so nothing is lost.
    const std::string old = path_join(folder, manifest::old_name(step));
    RETURN_IF_ERROR(manifest::remove_all(fs, old));
    RETURN_IF_ERROR(fs.rename(final_path, old));
  }
  RETURN_IF_ERROR(fs.rename(tmp, final_path));
  RETURN_IF_ERROR(fs.sync_dir(folder));
  // The folder itself may be new.
  return fs.sync_dir(parent(folder));
}

}  // namespace

Result<Index> make_index(const pb::Manifest& of, const ParamTable& table) {
  pb::Manifest m = of;
  m.set_format(manifest::kFormat);
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
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  Index index{.bytes = std::string(size, '\0'), .made_of = shown_by_index(m)};
  RETURN_IF_ERROR(file->read_at(
      0, std::as_writable_bytes(std::span(index.bytes.data(), size))));
  return index;
}

std::vector<int> missing_shards(FileSystem& fs, const std::string& folder,
                                const SaveId& id, int num_shards) {
  std::vector<int> missing;
  for (int rank = 0; rank < num_shards; ++rank)
    if (!fs.exists(
            path_join(tmp_path(folder, id), manifest::sidecar_name(rank))))
      missing.push_back(rank);
  return missing;
}

Result<Committed> commit(FileSystem& fs, const std::string& folder,
                         pb::Manifest m, int num_shards,
                         const ParamTable& table, const Retention& retention,
                         const Index* ready) {
  CHECK(num_shards >= 1);
  const SaveId id{.step = m.step(), .generation = m.generation()};
  const std::string tmp = tmp_path(folder, id);
  Committed done;
  done.path = path_join(folder, manifest::step_name(id.step));

  auto existing = read_all(fs, done.path);
  if (existing.ok()) {
    done.existed = true;
    done.manifest = std::move(*existing);
    done.cleanup = abandon(fs, folder, id);
    return done;
  }
  const std::vector<int> missing = missing_shards(fs, folder, id, num_shards);
  if (!missing.empty())
    return unavailable(fmt::format("{}: no complete shard of rank {} yet", tmp,
                                   fmt::join(missing, ", ")));
  m.set_format(manifest::kFormat);
  RETURN_IF_ERROR(collect_shards(fs, tmp, num_shards, m));
  RETURN_IF_ERROR(manifest::check_coverage(m, table).with_context(tmp));
  RETURN_IF_ERROR(write_index(fs, tmp, m, table, ready));
  RETURN_IF_ERROR(manifest::write_file(
      fs, path_join(tmp, manifest::kManifestName), manifest::encode(m)));
  for (int rank = 0; rank < num_shards; ++rank)
    RETURN_IF_ERROR(fs.remove(path_join(tmp, manifest::sidecar_name(rank))));
  RETURN_IF_ERROR(fs.sync_dir(tmp));
  RETURN_IF_ERROR(publish(fs, folder, tmp, done.path, id.step));
  done.manifest = std::move(m);
  done.cleanup = clean_up(fs, folder, id, retention, done.removed);
  return done;
}

Status abandon(FileSystem& fs, const std::string& folder, const SaveId& id) {
  return manifest::remove_all(fs, tmp_path(folder, id));
}

}  // namespace remesh::store
