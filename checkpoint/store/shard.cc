#include <fmt/format.h>

#include <map>
#include <set>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/shard_layout.h"
#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;
using manifest::path_join;

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

Status write_tensor(Hdf5Writer& w, size_t tensor, const ParamTable& table,
                    const std::vector<std::string>& names,
                    const std::vector<Piece<const float>>& pieces) {
  RETURN_IF_ERROR(w.make_group(std::string("/") + kTensors[tensor]));
  std::set<std::string> groups;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const pb::Slice& slice = pieces[i].slice;
    if (groups.insert(slice.param()).second)
      RETURN_IF_ERROR(w.make_group(dataset_path(tensor, slice.param())));
    const std::string path = dataset_path(tensor, names[i]);
    RETURN_IF_ERROR(w.write_floats(path, count_of(slice),
                                   tensor_of(pieces[i], tensor),
                                   pieces[i].row_stride));
    RETURN_IF_ERROR(w.set_attribute(path, "start", start_of(slice)));
    const int param = table.find(slice.param());
    RETURN_IF_ERROR(w.set_attribute(path, "shape",
                                    table[static_cast<size_t>(param)].shape));
  }
  return ok_status();
}

Status write_hdf5(FileSystem& fs, const std::string& path, const SaveId& id,
                  const ParamTable& table, const pb::ShardFile& shard,
                  const std::vector<Piece<const float>>& pieces) {
  ASSIGN_OR_RETURN(const auto w, Hdf5Writer::create(fs, path));
  const std::pair<const char*, int64_t> facts[] = {
      {"format", manifest::kFormat},
      {"step", id.step},
      {"generation", id.generation},
      {"rank", shard.rank()}};
  for (const auto& [name, value] : facts)
    RETURN_IF_ERROR(w->set_attribute("/", name, std::span(&value, 1)));
  const std::vector<std::string> names = slice_names(shard);
  for (size_t t = 0; t < kTensors.size(); ++t)
    RETURN_IF_ERROR(write_tensor(*w, t, table, names, pieces));
  return w->finish();
}

// The steps of write_shard that can fail half-way.
Status write_files(FileSystem& fs, const std::string& dir, const SaveId& id,
                   const ParamTable& table,
                   const std::vector<Piece<const float>>& pieces,
                   pb::ShardFile& shard) {
  const std::string path = path_join(dir, shard.name());
  RETURN_IF_ERROR(write_hdf5(fs, path, id, table, shard, pieces));
  ASSIGN_OR_RETURN(const uint64_t bytes, fs.size(path));
  // Read back, mostly from the page cache: HDF5 does not write in order.
  ASSIGN_OR_RETURN(const std::string checksum, manifest::xxh128_file(fs, path));
  shard.set_bytes(bytes);
  shard.set_xxh128(checksum);
  // The shard's name must be as durable as the note that vouches for it.
  RETURN_IF_ERROR(fs.sync_dir(dir));
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

std::vector<std::string> slice_names(const pb::ShardFile& shard) {
  std::map<std::string, int> count;
  std::vector<std::string> names;
  for (const pb::Slice& s : shard.slices())
    names.push_back(fmt::format("{}/{}", s.param(), count[s.param()]++));
  return names;
}

std::string dataset_path(size_t tensor, const std::string& slice_name) {
  return fmt::format("/{}/{}", kTensors[tensor], slice_name);
}

Result<pb::ShardFile> write_shard(
    FileSystem& fs, const std::string& folder, const SaveId& id, int rank,
    const ParamTable& table, const std::vector<Piece<const float>>& pieces) {
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
  RETURN_IF_ERROR(
      manifest::remove_all(fs, path_join(dir, manifest::sidecar_name(rank))));
  const Status written = write_files(fs, dir, id, table, pieces, shard);
  if (written.ok()) return shard;
  // Free what a full disk needs back; the first failure is the one to tell.
  (void)manifest::remove_all(fs, path_join(dir, shard.name()));
  return written;
}

}  // namespace remesh::store
