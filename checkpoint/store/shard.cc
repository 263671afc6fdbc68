
#include <array>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/layouts.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

Status check_piece(const Piece<const float>& piece, const ParamTable& table) {
  RETURN_IF_ERROR(manifest::check_in_table(piece.slice, table));
  CHECK(piece.weights != nullptr && piece.exp_avg != nullptr &&
        piece.exp_avg_sq != nullptr);
  CHECK(piece.slice.count_size() == 1 ||
        piece.row_stride >= piece.slice.count(1) || piece.slice.count(0) == 1);
  return ok_status();
}

const float* tensor_of(const Piece<const float>& piece, size_t tensor) {
  return std::array{piece.weights, piece.exp_avg, piece.exp_avg_sq}[tensor];
}

// The elements of one tensor of one piece.
Status append_elements(BlockWriter& out, const Piece<const float>& piece,
                       size_t tensor) {
  const manifest::Box box = manifest::box_of(piece.slice);
  const float* data = tensor_of(piece, tensor);
  const bool dense = box.rows == 1 || piece.row_stride == box.cols;
  const auto width = static_cast<size_t>(dense ? box.numel() : box.cols);
  for (int64_t r = 0; r < (dense ? 1 : box.rows); ++r)
    RETURN_IF_ERROR(out.append(
        std::as_bytes(std::span(data + r * piece.row_stride, width))));
  return ok_status();
}

// What HDF5 put between the elements.
Status append_layout(BlockWriter& out, File& layout, uint64_t begin,
                     uint64_t end) {
  std::vector<std::byte> bytes(end - begin);
  RETURN_IF_ERROR(layout.read_at(begin, bytes));
  return out.append(bytes);
}

// HDF5 lays the file out in memory, which needs no element; then everything is
// written from front to back, the elements straight from where they are: one
// pass, no copies, the checksums on the way.
Status write_plain(File& file, const SaveId& id, const ParamTable& table,
                   const std::vector<Piece<const float>>& pieces,
                   Layouts* layouts, pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(const ShardLayout layout,
                   lay_out(layouts, id, table, shard));
  BlockWriter out(file);
  uint64_t at = 0;
  for (const StoredTensor& t : layout.tensors) {
    CHECK(t.begin >= at && t.end <= layout.size);
    RETURN_IF_ERROR(append_layout(out, *layout.rest, at, t.begin));
    RETURN_IF_ERROR(append_elements(out, pieces[t.slice], t.tensor));
    at = t.end;
  }
  RETURN_IF_ERROR(append_layout(out, *layout.rest, at, layout.size));
  return out.finish(shard);
}

// Sizes show only while compressing, so HDF5 writes the file in its own order
// and it is read back for the checksums, which costs little beside the rest.
Result<std::unique_ptr<File>> write_compressed(
    std::unique_ptr<File> file, const std::string& path, const SaveId& id,
    const ParamTable& table, const std::vector<Piece<const float>>& pieces,
    pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(const auto w, Hdf5Writer::create(std::move(file), path));
  RETURN_IF_ERROR(write_contents(
      *w, id, table, shard,
      [&](const TensorId& t, std::span<const Attribute> attributes) {
        const Piece<const float>& piece = pieces[t.slice];
        return w->write_compressed(t.path, count_of(piece.slice), attributes,
                                   tensor_of(piece, t.tensor),
                                   piece.row_stride);
      }));
  ASSIGN_OR_RETURN(file, w->finish());
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  RETURN_IF_ERROR(append_sums(*file, size, shard));
  return file;
}

// The steps of write_shard that can fail half-way.
Status write_files(FileSystem& fs, const std::string& dir, const SaveId& id,
                   const ParamTable& table,
                   const std::vector<Piece<const float>>& pieces,
                   Compression compression, const Beside& beside,
                   pb::ShardFile& shard) {
  const std::string path = path_join(dir, shard.name());
  const bool plain = compression == Compression::kNone;
  ASSIGN_OR_RETURN(auto file, plain ? fs.create_streamed(path, beside.stream)
                                    : fs.create(path));
  if (plain) {
    RETURN_IF_ERROR(
        write_plain(*file, id, table, pieces, beside.layouts, shard));
  } else {
    ASSIGN_OR_RETURN(file, write_compressed(std::move(file), path, id, table,
                                            pieces, shard));
  }
  if (beside.taken) beside.taken();
  RETURN_IF_ERROR(file->sync());
  RETURN_IF_ERROR(file->close());
  return write_sidecar(fs, dir, shard);
}

}  // namespace

template <typename T>
std::vector<Piece<T>> pieces_of_range(const ParamTable& table, int64_t begin,
                                      int64_t end, const FlatState<T>& state) {
  const auto at = [&](std::span<T> tensor, int64_t element) -> T* {
    if (tensor.empty()) return nullptr;
    CHECK(begin >= state.begin &&
          end <= state.begin + static_cast<int64_t>(tensor.size()));
    return tensor.data() + (element - state.begin);
  };
  std::vector<Piece<T>> pieces;
  for (pb::Slice& s : manifest::slices_of_range(table, begin, end)) {
    const auto param = static_cast<size_t>(table.find(s.param()));
    const manifest::Box box = manifest::box_of(s);
    const int64_t stride = table[param].shape.back();
    const int64_t first = table.offset(param) + box.row * stride + box.col;
    pieces.push_back({.slice = std::move(s),
                      .weights = at(state.weights, first),
                      .exp_avg = at(state.exp_avg, first),
                      .exp_avg_sq = at(state.exp_avg_sq, first),
                      .row_stride = stride});
  }
  return pieces;
}

template std::vector<Piece<float>> pieces_of_range(const ParamTable&, int64_t,
                                                   int64_t,
                                                   const FlatState<float>&);
template std::vector<Piece<const float>> pieces_of_range(
    const ParamTable&, int64_t, int64_t, const FlatState<const float>&);

Result<Compression> parse_compression(const std::string& name) {
  if (name.empty() || name == "none") return Compression::kNone;
  if (name == "zlib") return Compression::kZlib;
  return invalid_argument("compression '" + name + "': allowed are none, zlib");
}

Result<pb::ShardFile> write_shard(FileSystem& fs, const std::string& folder,
                                  const SaveId& id, int rank,
                                  const ParamTable& table,
                                  const std::vector<Piece<const float>>& pieces,
                                  Compression compression,
                                  const Beside& beside) {
  pb::ShardFile shard;
  shard.set_name(manifest::shard_name(rank));
  shard.set_rank(rank);
  for (const Piece<const float>& piece : pieces) {
    RETURN_IF_ERROR(check_piece(piece, table));
    *shard.add_slices() = piece.slice;
  }
  const std::string dir = tmp_path(folder, id);
  RETURN_IF_ERROR(fs.create_dirs(dir));
  // A note of an earlier try must not vouch for what is written now.
  RETURN_IF_ERROR(remove_all(fs, path_join(dir, manifest::sidecar_name(rank))));
  const Status written =
      write_files(fs, dir, id, table, pieces, compression, beside, shard);
  if (written.ok()) return shard;
  // Free what a full disk needs back; the first failure is the one to tell.
  (void)remove_all(fs, path_join(dir, shard.name()));
  return written;
}

}  // namespace remesh::store
