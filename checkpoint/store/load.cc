#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <span>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::Piece;
using geometry::Rect;
using geometry::StateView;
using manifest::Read;

// The stored slice must be the one that the manifest says.
Status check_dataset(Hdf5Reader& reader, const std::string& file,
                     const std::string& path, const pb::Slice& slice) {
  ASSIGN_OR_RETURN(const Dims dims, reader.dims(path));
  ASSIGN_OR_RETURN(const Dims start, reader.attribute(path, "start"));
  if (dims == count_of(slice) && start == start_of(slice)) return ok_status();
  return corrupt(fmt::format(
      "{}: {} holds ({}) from ({}), the manifest says ({}) from ({})", file,
      path, fmt::join(dims, ", "), fmt::join(start, ", "),
      fmt::join(slice.count(), ", "), fmt::join(slice.start(), ", ")));
}

// A part of a stored slice, into one tensor of the state.
Status read_part(Hdf5Reader& reader, const std::string& path,
                 const geometry::Copy& copy, std::span<float> tensor) {
  const int64_t end = copy.to_at + (copy.rows - 1) * copy.to_stride + copy.cols;
  CHECK(copy.to_at >= 0 && end <= static_cast<int64_t>(tensor.size()));
  const Rect part{.row = copy.from_at / copy.from_stride,
                  .col = copy.from_at % copy.from_stride,
                  .rows = copy.rows,
                  .cols = copy.cols};
  return reader.read_floats(path, part, tensor.data() + copy.to_at,
                            copy.to_stride);
}

using OpenShard =
    std::function<Result<std::unique_ptr<Hdf5Reader>>(int, const std::string&)>;

Status load_shard(const OpenShard& open, const std::string& dir,
                  const pb::Manifest& m, std::span<const Read> reads,
                  const StateView& state) {
  const int index = reads.front().shard;
  const pb::ShardFile& shard = m.shards(index);
  const std::string file = path_join(dir, shard.name());
  ASSIGN_OR_RETURN(const auto reader, open(index, file));
  ASSIGN_OR_RETURN(const Dims step, reader->attribute("/", "step"));
  if (step != Dims{m.step()})
    return corrupt(file + ": is not of step " + std::to_string(m.step()));
  const std::vector<std::string> names = slice_names(shard);
  for (size_t t = 0; t < kTensors.size(); ++t) {
    if (state[t].empty()) continue;
    for (const Read& read : reads) {
      const pb::Slice& stored = shard.slices(read.slice);
      const std::string path =
          dataset_path(t, names[static_cast<size_t>(read.slice)]);
      Status s = check_dataset(*reader, file, path, stored);
      if (s.ok()) s = read_part(*reader, path, read.copy, state[t]);
      if (!s.ok())
        return Status(s.code(), s.message() + ", needed for " + path);
    }
  }
  return ok_status();
}

Status load_shards(const OpenShard& open, const std::string& path,
                   const pb::Manifest& m, const geometry::ParamTable& table,
                   std::span<const Piece> pieces, const StateView& state) {
  ASSIGN_OR_RETURN(std::vector<Read> reads,
                   manifest::plan_reads(m, table, pieces).with_context(path));
  for (auto first = reads.begin(); first != reads.end();) {
    const auto last = std::find_if(first, reads.end(), [&](const Read& r) {
      return r.shard != first->shard;
    });
    RETURN_IF_ERROR(load_shard(open, path, m, std::span(first, last), state));
    first = last;
  }
  return ok_status();
}

}  // namespace

Status load(FileSystem& fs, const std::string& path, const pb::Manifest& m,
            const geometry::ParamTable& table, std::span<const Piece> pieces,
            const StateView& state) {
  const auto open = [&](int shard, const std::string& file) {
    return open_shard(fs, file, m.shards(shard));
  };
  return load_shards(open, path, m, table, pieces, state);
}

Result<OpenShards> open_shards(FileSystem& fs, const std::string& path,
                               const pb::Manifest& m) {
  OpenShards files;
  for (const pb::ShardFile& shard : m.shards()) {
    ASSIGN_OR_RETURN(auto file, fs.open(path_join(path, shard.name())));
    files.push_back(std::move(file));
  }
  return files;
}

Status load(const OpenShards& files, const std::string& path,
            const pb::Manifest& m, const geometry::ParamTable& table,
            std::span<const Piece> pieces, const StateView& state) {
  const auto open = [&](int shard, const std::string& file) {
    return open_shard(files[static_cast<size_t>(shard)], file, m.shards(shard));
  };
  return load_shards(open, path, m, table, pieces, state);
}

}  // namespace remesh::store
