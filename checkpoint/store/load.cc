#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using manifest::Box;
using manifest::Read;

float* tensor_of(const Piece<float>& piece, size_t tensor) {
  return std::array{piece.weights, piece.exp_avg, piece.exp_avg_sq}[tensor];
}

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

// One stored slice's part of one wanted piece.
Status read_part(Hdf5Reader& reader, const std::string& path,
                 const pb::Slice& stored, const Box& part,
                 const pb::Slice& wanted, float* out, int64_t row_stride) {
  const Box from = manifest::box_of(stored);
  const Box to = manifest::box_of(wanted);
  Box local = part;
  local.row -= from.row;
  local.col -= from.col;
  const int64_t row = part.row - to.row;
  const int64_t skip = (row == 0 ? 0 : row * row_stride) + part.col - to.col;
  return reader.read_floats(path, local, out + skip, row_stride);
}

Status load_shard(FileSystem& fs, const std::string& dir, const pb::Manifest& m,
                  std::span<const Read> reads,
                  const std::vector<Piece<float>>& pieces) {
  const pb::ShardFile& shard = m.shards(reads.front().shard);
  const std::string file = path_join(dir, shard.name());
  ASSIGN_OR_RETURN(const auto reader, open_shard(fs, file, shard));
  ASSIGN_OR_RETURN(const Dims step, reader->attribute("/", "step"));
  if (step != Dims{m.step()})
    return corrupt(file + ": is not of step " + std::to_string(m.step()));
  const std::vector<std::string> names = slice_names(shard, m.format());
  for (size_t t = 0; t < kTensors.size(); ++t)
    for (size_t i = 0; i < reads.size(); ++i) {
      const Piece<float>& piece = pieces[reads[i].wanted];
      float* out = tensor_of(piece, t);
      if (out == nullptr) continue;
      const pb::Slice& stored = shard.slices(reads[i].slice);
      const std::string path =
          dataset_path(t, names[static_cast<size_t>(reads[i].slice)]);
      Status s = check_dataset(*reader, file, path, stored);
      if (s.ok())
        s = read_part(*reader, path, stored, reads[i].box, piece.slice, out,
                      piece.row_stride);
      if (!s.ok())
        return Status(s.code(), s.message() + ", needed for " + path);
    }
  return ok_status();
}

}  // namespace

Status load(FileSystem& fs, const std::string& path, const pb::Manifest& m,
            const geometry::ParamTable& table,
            const std::vector<Piece<float>>& pieces) {
  std::vector<pb::Slice> wanted;
  for (const Piece<float>& piece : pieces) wanted.push_back(piece.slice);
  auto reads = manifest::plan_reads(m, table, wanted);
  if (!reads.ok()) return reads.status().with_context(path);
  for (auto first = reads->begin(); first != reads->end();) {
    const auto last = std::find_if(first, reads->end(), [&](const Read& r) {
      return r.shard != first->shard;
    });
    RETURN_IF_ERROR(load_shard(fs, path, m, std::span(first, last), pieces));
    first = last;
  }
  return ok_status();
}

}  // namespace remesh::store
