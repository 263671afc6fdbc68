#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::ConstStateView;
using geometry::ParamTable;
using geometry::Piece;

struct ShardContent {
  const SaveId& id;
  const ParamTable& table;
  std::span<const Piece> pieces;
  const ConstStateView& state;
};

void check_inside(const Piece& p, const ConstStateView& state) {
  const int64_t end = p.at + (p.rect.rows - 1) * p.row_stride + p.rect.cols;
  for (size_t t = 0; t < kTensors.size(); ++t)
    CHECK(p.at >= 0 && end <= static_cast<int64_t>(state[t].size()));
  CHECK(p.rect.rows == 1 || p.row_stride >= p.rect.cols);
}

// The elements of one tensor of one piece.
Status append_elements(BlockWriter& out, const Piece& piece,
                       std::span<const float> tensor) {
  const geometry::Rect& rect = piece.rect;
  const float* const data = tensor.data() + piece.at;
  const bool dense = rect.rows == 1 || piece.row_stride == rect.cols;
  const auto width = static_cast<size_t>(dense ? rect.numel() : rect.cols);
  for (int64_t r = 0; r < (dense ? 1 : rect.rows); ++r)
    RETURN_IF_ERROR(out.append(
        std::as_bytes(std::span(data + r * piece.row_stride, width))));
  return ok_status();
}

// What HDF5 wrote between the elements.
Status append_layout(BlockWriter& out, File& layout, uint64_t begin,
                     uint64_t end) {
  std::vector<std::byte> bytes(end - begin);
  RETURN_IF_ERROR(layout.read_at(begin, bytes));
  return out.append(bytes);
}

// HDF5 lays the file out in memory, which needs no element; then everything is
// written from front to back, the elements straight from the state: one pass,
// no copies, the checksums computed on the way.
Status write_plain(File& file, const ShardContent& from, pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(const ShardLayout layout,
                   lay_out(from.id, from.table, shard));
  BlockWriter out(file);
  uint64_t at = 0;
  for (const StoredTensor& t : layout.tensors) {
    CHECK(t.begin >= at && t.end <= layout.size);
    RETURN_IF_ERROR(append_layout(out, *layout.rest, at, t.begin));
    RETURN_IF_ERROR(
        append_elements(out, from.pieces[t.slice], from.state[t.tensor]));
    at = t.end;
  }
  RETURN_IF_ERROR(append_layout(out, *layout.rest, at, layout.size));
  return out.finish(shard);
}

// Sizes are known only after compression, so HDF5 writes the file in its own
// order and it is read back for the checksums, which is cheap in comparison.
Result<std::unique_ptr<File>> write_compressed(std::unique_ptr<File> file,
                                               const std::string& path,
                                               const ShardContent& from,
                                               pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(const auto w, Hdf5Writer::create(std::move(file), path));
  RETURN_IF_ERROR(write_contents(
      *w, from.id, from.table, shard,
      [&](const TensorId& t, std::span<const Attribute> attributes) {
        const Piece& piece = from.pieces[t.slice];
        return w->write_compressed(
            t.path, count_of(shard.slices(static_cast<int>(t.slice))),
            attributes, from.state[t.tensor].data() + piece.at,
            piece.row_stride);
      }));
  ASSIGN_OR_RETURN(file, w->finish());
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  RETURN_IF_ERROR(append_sums(*file, size, shard));
  return file;
}

// The steps of write_shard that may leave a partial file when they fail.
Status write_files(FileSystem& fs, const std::string& dir,
                   const ShardContent& from, const WriteOptions& options,
                   pb::ShardFile& shard) {
  const std::string path = path_join(dir, shard.name());
  const bool plain = options.compression == Compression::kNone;
  ASSIGN_OR_RETURN(auto file, plain ? fs.create_streamed(path, options.stream)
                                    : fs.create(path));
  if (plain) {
    if (options.taking) RETURN_IF_ERROR(options.taking());
    RETURN_IF_ERROR(write_plain(*file, from, shard));
  } else {
    ASSIGN_OR_RETURN(file,
                     write_compressed(std::move(file), path, from, shard));
  }
  if (options.taken) options.taken();
  RETURN_IF_ERROR(file->sync());
  RETURN_IF_ERROR(file->close());
  return write_sidecar(fs, dir, shard);
}

}  // namespace

Result<Compression> parse_compression(const std::string& name) {
  if (name.empty() || name == "none") return Compression::kNone;
  if (name == "zlib") return Compression::kZlib;
  return invalid_argument("compression '" + name + "': allowed are none, zlib");
}

Result<pb::ShardFile> write_shard(FileSystem& fs, const std::string& folder,
                                  const SaveId& id, int rank,
                                  const ParamTable& table,
                                  std::span<const Piece> pieces,
                                  const ConstStateView& state,
                                  const WriteOptions& options) {
  pb::ShardFile shard;
  shard.set_name(manifest::shard_name(rank));
  shard.set_rank(rank);
  for (const Piece& piece : pieces) {
    RETURN_IF_ERROR(manifest::check_piece(piece, table));
    check_inside(piece, state);
    *shard.add_slices() = manifest::make_slice(table[piece.param], piece.rect);
  }
  const std::string dir = tmp_path(folder, id);
  RETURN_IF_ERROR(fs.create_dirs(dir));
  // The sidecar of an earlier attempt must not vouch for what is written now.
  RETURN_IF_ERROR(remove_all(fs, path_join(dir, manifest::sidecar_name(rank))));
  const Status written =
      write_files(fs, dir, {id, table, pieces, state}, options, shard);
  if (written.ok()) return shard;
  // Release the space on a full disk; the first failure is the one to report.
  (void)remove_all(fs, path_join(dir, shard.name()));
  return written;
}

}  // namespace remesh::store
