#include <fmt/format.h>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/index_file.h"
#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

Status write_index(FileSystem& fs, const std::string& dir, pb::Manifest& m,
                   const ParamTable& table) {
  ASSIGN_OR_RETURN(const std::string bytes, index_bytes(m, table));
  RETURN_IF_ERROR(write_file(fs, path_join(dir, manifest::kIndexName), bytes));
  m.mutable_index()->set_name(manifest::kIndexName);
  m.mutable_index()->set_bytes(bytes.size());
  m.mutable_index()->set_xxh128(xxh128_text(bytes));
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

// Ok when every byte that a restore needs matches the manifest.
Result<pb::Manifest> read_all(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto m, manifest::read_checkpoint(fs, path));
  for (const pb::ShardFile& shard : m.shards()) {
    const std::string file = path_join(path, shard.name());
    ASSIGN_OR_RETURN(const auto bad, find_bad_blocks(fs, file, shard));
    if (!bad.empty()) return corrupt(file + ": damaged");
  }
  return m;
}

Status saved_by_newer(const std::string& path, int64_t newer, int64_t older) {
  return cancelled(
      fmt::format("{}: generation {} saved it; generation {} is fenced", path,
                  newer, older));
}

// Removes what was set aside. One of another branch that a user keeps gets
// another name, because its own is taken. Of a checkpoint the shards go first
// (remove_all), so that what is left of one cannot be taken for whole.
Status remove_aside(FileSystem& fs, const std::string& folder, int64_t step,
                    int64_t generation) {
  const std::string old = path_join(folder, manifest::old_name(step));
  if (!manifest::may_be_kept(fs, old)) return remove_all(fs, old);
  const std::string name =
      path_join(folder, fmt::format("kept-{}-before-generation-{}",
                                    manifest::step_name(step), generation));
  std::string kept = name;
  for (int n = 2; fs.exists(kept); ++n) kept = fmt::format("{}-{}", name, n);
  RETURN_IF_ERROR(fs.rename(old, kept));
  return already_exists(
      fmt::format("{}: is kept, and another one has its step now; it is in {}",
                  manifest::step_name(step), kept));
}

// Renames a checkpoint atomically, so that it is out of the way and can be
// removed file by file.
//
// This process may have been stopped, or have waited for a network file system,
// since it looked, and a newer generation may have claimed the folder and saved
// the step meanwhile. So it looks again after the rename, when no cached
// listing can hide that, and puts the checkpoint back.
Status set_aside(FileSystem& fs, const std::string& folder, const SaveId& id,
                 int64_t step) {
  const std::string path = path_join(folder, manifest::step_name(step));
  const std::string old = path_join(folder, manifest::old_name(step));
  RETURN_IF_ERROR(manifest::check_claim(fs, folder, id.generation));
  Status freed = remove_aside(fs, folder, step, id.generation);
  if (!freed.ok() && freed.code() != Code::kAlreadyExists) return freed;
  RETURN_IF_ERROR(fs.rename(path, old));
  Status allowed = manifest::check_claim(fs, folder, id.generation);
  const auto m = manifest::read_checkpoint(fs, old);
  if (allowed.ok() && m.ok() && m->generation() > id.generation)
    allowed = saved_by_newer(path, m->generation(), id.generation);
  if (allowed.ok()) return fs.sync_dir(folder);
  // Fails where the newer generation has saved the step once more.
  (void)fs.rename(old, path).ok();
  return allowed;
}

// Whether retention may remove the checkpoint `m`, which was read with that
// status. One that cannot be read now may be good, and those of a newer
// generation and of another run are theirs.
bool may_remove(const Status& status, const pb::Manifest& m,
                const pb::Manifest& saved) {
  if (status.ok())
    return m.generation() <= saved.generation() &&
           manifest::check_run(m, saved.run_id()).ok();
  return status.code() == Code::kCorrupt || status.code() == Code::kNotFound;
}

// The process that set this checkpoint aside may have died before it could put
// it back. Whether it is one to keep is for retention to decide.
Status settle_aside(FileSystem& fs, const std::string& folder, int64_t step,
                    const pb::Manifest& saved,
                    const std::optional<manifest::Origin>& origin) {
  const std::string path = path_join(folder, manifest::step_name(step));
  const std::string old = path_join(folder, manifest::old_name(step));
  const auto m = manifest::read_checkpoint(fs, old);
  if (!may_remove(m.status(), m.ok() ? *m : pb::Manifest(), saved))
    return ok_status();
  if (m.ok() && !fs.exists(path) &&
      manifest::of_branch(origin, saved.generation(), step, m->generation()))
    return fs.rename(old, path);
  return remove_aside(fs, folder, step, saved.generation());
}

// Everything after the commit. Continues after a failure; returns the first.
Status clean_up(FileSystem& fs, const std::string& folder,
                const pb::Manifest& saved, const Retention& retention,
                const std::optional<manifest::Origin>& origin,
                std::vector<int64_t>& removed) {
  const SaveId id{.step = saved.step(), .generation = saved.generation()};
  Status first;
  const auto note = [&](const Status& s) {
    if (first.ok() && !s.ok()) first = s;
    return s.ok();
  };
  Status unfinished = remove_unfinished(fs, folder, id.generation);
  if (unfinished.code() == Code::kCancelled) return unfinished;
  note(unfinished);
  const auto names = fs.list(folder);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const auto old = manifest::parse_old_name(name);
    if (!old) continue;
    RETURN_IF_ERROR(manifest::check_claim(fs, folder, id.generation));
    note(settle_aside(fs, folder, *old, saved, origin));
  }
  const auto found = manifest::scan(fs, folder);
  if (!note(found.status())) return first;
  std::vector<int64_t> valid, invalid;
  std::set<int64_t> kept;
  for (const manifest::Found& f : *found) {
    if (f.kept) kept.insert(f.step);
    if (!may_remove(f.status, f.manifest, saved)) continue;
    const bool counts =
        f.status.ok() && manifest::of_branch(origin, id.generation, f.step,
                                             f.manifest.generation());
    (counts ? valid : invalid).push_back(f.step);
  }
  for (const int64_t step :
       manifest::to_remove(valid, invalid, retention.keep_latest_k,
                           retention.keep_every_n, kept)) {
    // Never remove what was just saved, even if the folder has higher steps.
    if (step == id.step) continue;
    Status aside = set_aside(fs, folder, id, step);
    if (aside.code() == Code::kCancelled) return aside;
    const std::string old = path_join(folder, manifest::old_name(step));
    // Somebody has asked for it to be kept since it was looked at.
    if (aside.ok() && manifest::may_be_kept(fs, old)) {
      note(fs.rename(old, path_join(folder, manifest::step_name(step))));
      continue;
    }
    if (note(aside) && note(remove_all(fs, old))) removed.push_back(step);
  }
  note(fs.sync_dir(folder));
  return first;
}

// Moves the finished directory to its final name. Another one there is invalid
// or of another branch, as checked before. One that appears there since then
// makes the rename fail, because it is not empty.
Status publish(FileSystem& fs, const std::string& folder,
               const std::string& tmp, const std::string& final_path,
               const SaveId& id) {
  // The folder itself may be new. A user who may not read the one above it
  // cannot sync that one.
  Status above = fs.sync_dir(parent_path(folder));
  if (!above.ok() && above.code() != Code::kDenied) return above;
  if (fs.exists(final_path))
    RETURN_IF_ERROR(set_aside(fs, folder, id, id.step));
  RETURN_IF_ERROR(fs.rename(tmp, final_path));
  return fs.sync_dir(folder);
}

}  // namespace

// A directory of this generation may be a save in progress.
Status remove_unfinished(FileSystem& fs, const std::string& folder,
                         int64_t generation) {
  RETURN_IF_ERROR(manifest::check_claim(fs, folder, generation));
  ASSIGN_OR_RETURN(const auto names, fs.list(folder));
  Status first;
  for (const std::string& name : names) {
    const auto tmp = manifest::parse_tmp_name(name);
    if (!tmp || tmp->generation >= generation) continue;
    const Status removed = remove_all(fs, path_join(folder, name));
    if (first.ok()) first = removed;
  }
  return first;
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

Result<CommitResult> commit(FileSystem& fs, const std::string& folder,
                            pb::Manifest m, int num_shards,
                            const ParamTable& table, const Retention& retention,
                            const std::optional<manifest::Origin>& origin) {
  CHECK(num_shards >= 1);
  const SaveId id{.step = m.step(), .generation = m.generation()};
  const std::string tmp = tmp_path(folder, id);
  CommitResult done;
  done.path = path_join(folder, manifest::step_name(id.step));

  RETURN_IF_ERROR(manifest::check_claim(fs, folder, id.generation));
  auto existing = read_all(fs, done.path);
  if (existing.ok())
    RETURN_IF_ERROR(
        manifest::check_run(*existing, m.run_id()).with_context(done.path));
  if (existing.ok() && manifest::of_branch(origin, id.generation, id.step,
                                           existing->generation())) {
    done.existed = true;
    done.manifest = std::move(*existing);
    done.cleanup = abandon(fs, folder, id);
    return done;
  }
  if (existing.ok() && existing->generation() > id.generation)
    return saved_by_newer(done.path, existing->generation(), id.generation);
  const std::vector<int> missing = missing_shards(fs, folder, id, num_shards);
  if (!missing.empty())
    return unavailable(
        fmt::format("{}: has no complete shard of rank {}; each host must have "
                    "the same folder at this path",
                    tmp, fmt::join(missing, ", ")));
  m.set_format(manifest::kFormat);
  RETURN_IF_ERROR(collect_shards(fs, tmp, num_shards, m));
  RETURN_IF_ERROR(manifest::check_coverage(m, table).with_context(tmp));
  RETURN_IF_ERROR(write_index(fs, tmp, m, table));
  RETURN_IF_ERROR(write_file(fs, path_join(tmp, manifest::kManifestName),
                             manifest::encode(m)));
  for (int rank = 0; rank < num_shards; ++rank)
    RETURN_IF_ERROR(fs.remove(path_join(tmp, manifest::sidecar_name(rank))));
  RETURN_IF_ERROR(fs.sync_dir(tmp));
  RETURN_IF_ERROR(manifest::check_claim(fs, folder, id.generation));
  RETURN_IF_ERROR(publish(fs, folder, tmp, done.path, id));
  done.manifest = std::move(m);
  done.cleanup =
      clean_up(fs, folder, done.manifest, retention, origin, done.removed);
  return done;
}

Status abandon(FileSystem& fs, const std::string& folder, const SaveId& id) {
  return remove_all(fs, tmp_path(folder, id));
}

}  // namespace remesh::store
