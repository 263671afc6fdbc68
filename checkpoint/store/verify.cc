#include "checkpoint/store/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/blocks.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/index_file.h"
#include "checkpoint/store/shard_layout.h"
#include "proto/base/clock.h"

namespace remesh::store {
namespace {

constexpr size_t kWeights = 0;

// Reads a dataset band by band and counts the elements that are not finite.
// `tick` gets the bytes of each band.
Status read_dataset(Hdf5Reader& reader, const std::string& path,
                    const pb::Slice& slice, int64_t& num_nonfinite,
                    const std::function<void(uint64_t)>& tick) {
  ASSIGN_OR_RETURN(const Dims dims, reader.dims(path));
  if (dims != count_of(slice))
    return corrupt(path + ": its shape differs from the manifest's slice");
  ASSIGN_OR_RETURN(const Dims start, reader.attribute(path, "start"));
  if (start != start_of(slice))
    return corrupt(path + ": its start differs from the manifest's slice");
  // Bands of about a chunk, for any layout.
  const Dims chunk = chunk_of(dims);
  const bool flat = dims.size() == 1;
  const int64_t rows = flat ? 1 : dims[0], cols = dims.back();
  const int64_t step_rows = flat ? 1 : chunk[0], step_cols = chunk.back();
  std::vector<float> values(static_cast<size_t>(step_rows * step_cols));
  for (int64_t r = 0; r < rows; r += step_rows)
    for (int64_t c = 0; c < cols; c += step_cols) {
      const geometry::Rect rect{.row = r,
                                .col = c,
                                .rows = std::min(step_rows, rows - r),
                                .cols = std::min(step_cols, cols - c)};
      RETURN_IF_ERROR(reader.read_floats(path, rect, values.data(), rect.cols));
      num_nonfinite +=
          std::count_if(values.begin(), values.begin() + rect.numel(),
                        [](float v) { return !std::isfinite(v); });
      tick(sizeof(float) * static_cast<uint64_t>(rect.numel()));
    }
  return ok_status();
}

// A part of a dataset and its place in the file.
struct NamedPart {
  uint64_t begin = 0, end = 0;  // bytes
  std::string dataset;
  geometry::Rect rect;
};

// The layout of an uncompressed shard is known without reading it.
std::vector<NamedPart> parts_of_layout(const ShardLayout& layout,
                                       const pb::ShardFile& shard) {
  const std::vector<std::string> names = slice_names(shard);
  std::vector<NamedPart> parts;
  for (const StoredTensor& t : layout.tensors) {
    geometry::Rect rect =
        manifest::rect_of(shard.slices(static_cast<int>(t.slice)));
    rect.row = rect.col = 0;
    parts.push_back(
        {t.begin, t.end, dataset_path(t.tensor, names[t.slice]), rect});
  }
  return parts;
}

// Otherwise, the parts of datasets whose metadata is intact.
std::vector<NamedPart> parts_of_file(Hdf5Reader& reader,
                                     const pb::ShardFile& shard) {
  std::vector<NamedPart> parts;
  for (size_t t = 0; t < kTensors.size(); ++t)
    for (const std::string& name : slice_names(shard)) {
      const std::string path = dataset_path(t, name);
      const auto stored = reader.parts(path);
      if (!stored.ok()) continue;
      for (const StoredPart& p : *stored)
        parts.push_back({p.begin, p.end, path, p.rect});
    }
  return parts;
}

// Empty if nothing is known.
std::vector<NamedPart> named_parts(FileSystem& fs, const std::string& path,
                                   const pb::ShardFile& shard,
                                   const pb::Manifest& m) {
  const auto config = manifest::model_config(m.model());
  if (!config.ok()) return {};
  const auto table = geometry::ParamTable::make(*config);
  if (!manifest::check_coverage(m, table).ok()) return {};
  const auto layout = lay_out({m.step(), m.generation()}, table, shard);
  // The size differs if the shard is compressed or another version of HDF5
  // wrote it.
  if (layout.ok() && layout->size == shard.data_bytes())
    return parts_of_layout(*layout, shard);
  const auto reader = open_shard(fs, path, shard);
  if (!reader.ok()) return {};
  return parts_of_file(**reader, shard);
}

// The datasets in a block, the first few by name.
std::string datasets_in(const BadBlock& block,
                        const std::vector<NamedPart>& parts) {
  constexpr size_t kMost = 4;
  std::vector<std::string> found;
  for (const NamedPart& p : parts) {
    const uint64_t begin = std::max(p.begin, block.begin);
    const uint64_t end = std::min(p.end, block.end);
    if (begin >= end) continue;
    // Any byte of a compressed part may affect every row.
    const auto row_bytes = static_cast<uint64_t>(p.rect.cols) * sizeof(float);
    const bool raw = p.end - p.begin ==
                     static_cast<uint64_t>(p.rect.numel()) * sizeof(float);
    const int64_t first =
        raw ? static_cast<int64_t>((begin - p.begin) / row_bytes) : 0;
    const int64_t last =
        raw ? static_cast<int64_t>((end - 1 - p.begin) / row_bytes)
            : p.rect.rows - 1;
    found.push_back(fmt::format("{} rows {}-{}", p.dataset, p.rect.row + first,
                                p.rect.row + last));
    if (p.rect.col != 0)
      found.back() += fmt::format(" from column {}", p.rect.col);
  }
  if (found.empty()) return "no dataset's elements; metadata, or unknown";
  const size_t more = found.size() > kMost ? found.size() - kMost : 0;
  found.resize(found.size() - more);
  std::string text = fmt::format("{}", fmt::join(found, ", "));
  if (more > 0) text += fmt::format(" and {} more", more);
  return text;
}

class Verifier {
 public:
  Verifier(FileSystem& fs, std::string path, const VerifyProgress& progress)
      : fs_(fs), path_(std::move(path)), progress_(progress) {}

  VerifyReport run() {
    const int64_t began_ns = monotonic_ns();
    // Without a manifest there is nothing to check against.
    const auto m = manifest::read_manifest(fs_, path_);
    if (m.ok())
      check(*m);
    else
      problem(m.status());
    report_.ok = report_.problems.empty();
    report_.seconds = seconds_since(began_ns);
    return std::move(report_);
  }

 private:
  void problem(const Status& s) {
    if (!s.ok()) report_.problems.push_back(s.message());
  }

  void check(const pb::Manifest& m) {
    report_.step = m.step();
    // Otherwise a dataset may be of any size.
    const bool whole = check_parameters(m);
    for (const pb::ShardFile& shard : m.shards()) total_ += shard.data_bytes();
    if (whole)
      total_ += kTensors.size() * sizeof(float) *
                static_cast<uint64_t>(report_.num_elements);
    for (const pb::ShardFile& shard : m.shards())
      if (check_bytes(shard, m) && whole) check_shard(shard, m);
    if (m.has_index() && count_file(m.index()))
      problem(check_index(fs_, path_join(path_, m.index().name()), m.index()));
    check_strays(m);
    if (report_.num_nonfinite > 0)
      report_.warnings.push_back(
          fmt::format("{} weights are NaN or infinite", report_.num_nonfinite));
  }

  // Whether the shards hold the parameters of a model.
  bool check_parameters(const pb::Manifest& m) {
    const auto config = manifest::model_config(m.model());
    if (!config.ok()) return problem(config.status()), false;
    const auto table = geometry::ParamTable::make(*config);
    report_.num_elements = table.num_elements();
    const Status covered = manifest::check_coverage(m, table);
    problem(covered);
    return covered.ok();
  }

  // Whether the file is there.
  bool count_file(const pb::ShardFile& file) {
    const auto size = fs_.size(path_join(path_, file.name()));
    if (!size.ok()) return problem(size.status()), false;
    ++report_.num_files;
    report_.bytes += *size;
    return true;
  }

  // Whether every byte of the shard matches the manifest.
  bool check_bytes(const pb::ShardFile& shard, const pb::Manifest& m) {
    if (!count_file(shard)) return false;
    const std::string path = path_join(path_, shard.name());
    const auto bad = find_bad_blocks(fs_, path, shard, tick_);
    if (!bad.ok()) return problem(bad.status()), false;
    if (bad->empty()) return true;
    const std::vector<NamedPart> parts = named_parts(fs_, path, shard, m);
    for (const BadBlock& block : *bad)
      problem(corrupt(fmt::format("{}: {} are damaged: {}", path, text(block),
                                  datasets_in(block, parts))));
    return false;
  }

  void check_shard(const pb::ShardFile& shard, const pb::Manifest& m) {
    const std::string file = path_join(path_, shard.name());
    const auto reader = open_shard(fs_, file, shard);
    if (!reader.ok()) return problem(reader.status());
    const auto saved = (*reader)->attribute("/", "step");
    if (!saved.ok() || *saved != std::vector<int64_t>{m.step()})
      problem(corrupt(file + ": is not of this step"));
    const std::vector<std::string> names = slice_names(shard);
    for (size_t t = 0; t < kTensors.size(); ++t)
      for (size_t i = 0; i < names.size(); ++i) {
        int64_t nonfinite = 0;
        problem(read_dataset(**reader, dataset_path(t, names[i]),
                             shard.slices(static_cast<int>(i)), nonfinite,
                             tick_)
                    .with_context(file));
        if (t == kWeights) report_.num_nonfinite += nonfinite;
      }
  }

  void check_strays(const pb::Manifest& m) {
    std::set<std::string> known = {manifest::kManifestName,
                                   manifest::kIndexName, manifest::kKeepName};
    for (const pb::ShardFile& shard : m.shards()) known.insert(shard.name());
    const auto names = fs_.list(path_);
    if (!names.ok()) return problem(names.status());
    for (const std::string& name : *names)
      if (known.count(name) == 0)
        report_.warnings.push_back(path_join(path_, name) +
                                   ": not part of the checkpoint");
  }

  FileSystem& fs_;
  const std::string path_;
  const VerifyProgress& progress_;
  uint64_t done_ = 0, total_ = 0;
  const std::function<void(uint64_t)> tick_ = [this](uint64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  };
  VerifyReport report_;
};

}  // namespace

VerifyReport verify(FileSystem& fs, const std::string& path,
                    const VerifyProgress& progress) {
  return Verifier(fs, path, progress).run();
}

}  // namespace remesh::store
