#include "checkpoint/store/sidecar.h"

namespace remesh::store {

std::string tmp_path(const std::string& folder, const SaveId& id) {
  return path_join(folder, manifest::tmp_name(
                               {.step = id.step, .generation = id.generation}));
}

Status write_sidecar(FileSystem& fs, const std::string& dir,
                     const pb::ShardFile& shard) {
  const std::string path = path_join(dir, manifest::sidecar_name(shard.rank()));
  const std::string body = shard.SerializeAsString();
  const std::string text = xxh128_text(body) + body;
  {
    ASSIGN_OR_RETURN(const auto file, fs.create(path + ".part"));
    RETURN_IF_ERROR(
        file->write_at(0, std::as_bytes(std::span(text.data(), text.size()))));
    RETURN_IF_ERROR(file->close());
  }
  return fs.rename(path + ".part", path);
}

Result<pb::ShardFile> read_sidecar(FileSystem& fs, const std::string& dir,
                                   int rank) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  constexpr size_t kChecksum = 32;
  const std::string path = path_join(dir, manifest::sidecar_name(rank));
  ASSIGN_OR_RETURN(const std::string text, read_file(fs, path, kMaxBytes));
  pb::ShardFile shard;
  if (text.size() < kChecksum ||
      xxh128_text(text.substr(kChecksum)) != text.substr(0, kChecksum) ||
      !shard.ParseFromString(text.substr(kChecksum)) || shard.rank() != rank ||
      shard.name() != manifest::shard_name(rank))
    return corrupt(path + ": damaged");
  return shard;
}

}  // namespace remesh::store
