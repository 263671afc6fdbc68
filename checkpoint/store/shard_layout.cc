#include "checkpoint/store/shard_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/sparse_file.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

Status write_tensor(Hdf5Writer& w, size_t tensor, const ParamTable& table,
                    const pb::ShardFile& shard,
                    const std::vector<std::string>& names,
                    const PutTensor& put) {
  RETURN_IF_ERROR(w.make_group(std::string("/") + kTensors[tensor]));
  for (size_t i = 0; i < names.size(); ++i) {
    const pb::Slice& slice = shard.slices(static_cast<int>(i));
    const auto param = static_cast<size_t>(table.find(slice.param()));
    const Attribute attributes[] = {{"start", start_of(slice)},
                                    {"shape", table[param].shape}};
    RETURN_IF_ERROR(
        put({dataset_path(tensor, names[i]), i, tensor}, attributes));
  }
  return ok_status();
}

}  // namespace

std::vector<std::string> slice_names(const pb::ShardFile& shard) {
  std::map<std::string, int> count;
  std::vector<std::string> names;
  for (const pb::Slice& s : shard.slices())
    names.push_back(fmt::format("{}.{}", s.param(), count[s.param()]++));
  return names;
}

std::string dataset_path(size_t tensor, const std::string& slice_name) {
  return fmt::format("/{}/{}", kTensors[tensor], slice_name);
}

Status write_contents(Hdf5Writer& w, const SaveId& id, const ParamTable& table,
                      const pb::ShardFile& shard, const PutTensor& put) {
  const std::pair<const char*, int64_t> facts[] = {
      {"format", manifest::kFormat},
      {"step", id.step},
      {"generation", id.generation},
      {"rank", shard.rank()}};
  for (const auto& [name, value] : facts)
    RETURN_IF_ERROR(w.set_attribute(name, std::span(&value, 1)));
  const std::vector<std::string> names = slice_names(shard);
  for (size_t t = 0; t < kTensors.size(); ++t)
    RETURN_IF_ERROR(write_tensor(w, t, table, shard, names, put));
  return ok_status();
}

Result<ShardLayout> lay_out(const SaveId& id, const ParamTable& table,
                            const pb::ShardFile& shard) {
  ShardLayout layout;
  ASSIGN_OR_RETURN(
      const auto w,
      Hdf5Writer::create(std::make_unique<SparseFile>(), shard.name()));
  RETURN_IF_ERROR(write_contents(
      *w, id, table, shard,
      [&](const TensorId& id, std::span<const Attribute> attributes) -> Status {
        const pb::Slice& s = shard.slices(static_cast<int>(id.slice));
        ASSIGN_OR_RETURN(const uint64_t at,
                         w->reserve_floats(id.path, count_of(s), attributes));
        const auto n = static_cast<uint64_t>(manifest::rect_of(s).numel());
        layout.tensors.push_back({.begin = at,
                                  .end = at + n * sizeof(float),
                                  .slice = id.slice,
                                  .tensor = id.tensor});
        return ok_status();
      }));
  ASSIGN_OR_RETURN(layout.rest, w->finish());
  ASSIGN_OR_RETURN(layout.size, layout.rest->size());
  std::sort(layout.tensors.begin(), layout.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return a.begin < b.begin;
            });
  return layout;
}

Result<std::unique_ptr<Hdf5Reader>> open_shard(FileSystem& fs,
                                               const std::string& path,
                                               const pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(auto file, fs.open(path));
  return open_shard(std::move(file), path, shard);
}

Result<std::unique_ptr<Hdf5Reader>> open_shard(std::shared_ptr<File> file,
                                               const std::string& path,
                                               const pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(auto verified, open_verified(std::move(file), path, shard));
  return Hdf5Reader::open(std::move(verified), path);
}

}  // namespace remesh::store
