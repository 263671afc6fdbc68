#include "worker/train/restore.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "proto/base/text.h"
#include "worker/train/watched_fs.h"

namespace remesh::train {
namespace {

// Checks the checkpoint as far as possible before reading tensors.
Result<pb::Manifest> read_manifest(FileSystem& fs, const std::string& path,
                                   int64_t step,
                                   const manifest::JobIdentity& job) {
  ASSIGN_OR_RETURN(pb::Manifest m, manifest::read_checkpoint(fs, path));
  if (m.step() != step)
    return corrupt(
        fmt::format("{}: holds step {}, expected {}", path, m.step(), step));
  const std::vector<std::string> d = manifest::differences(m, job);
  if (!d.empty())
    return invalid_argument(
        fmt::format("{}: belongs to another job: {}", path, join(d, "; ")));
  return m;
}

}  // namespace

void fill_initial_weights(const geometry::RankShard& rank, uint64_t seed,
                          int threads, std::span<float> weights) {
  const geometry::ShardTable& shard = rank.shard;
  const geometry::ZeroPlan& zero = rank.zero;
  constexpr int64_t kChunk = 8192;
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const geometry::FlatRange part = zero.norm_range(u);
    const int64_t offset = zero.state_offset(u) - zero.update_range(u).begin;
    const int64_t chunks = (part.size() + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t at = part.begin + c * kChunk;
      const int64_t n = std::min(kChunk, part.end - at);
      shard.initial_values(seed, at,
                           weights.subspan(static_cast<size_t>(offset + at),
                                           static_cast<size_t>(n)));
    }
  }
}

Status load_initial_weights(FileSystem& inner, const std::string& path,
                            const geometry::RankShard& rank,
                            const std::function<void()>& tick,
                            std::span<float> weights,
                            std::string* fingerprint) {
  const auto fs = watched_file_system(inner, tick);
  const auto load = [&]() -> Status {
    ASSIGN_OR_RETURN(const auto source,
                     huggingface::WeightSource::open(*fs, path));
    if (fingerprint != nullptr) {
      ASSIGN_OR_RETURN(*fingerprint,
                       source.check_base(path, *fingerprint, tick));
    }
    return source.load(rank.shard.table(), geometry::pieces_to_load(rank),
                       weights, tick);
  };
  Status status = load();
  if (status.ok() || status.code() == Code::kIo) return status;
  return Status(
      is_unreadable(status.code()) ? status.code() : Code::kInvalidArgument,
      "model.init_from: " + status.message());
}

void exchange_parts(comm::Comm& data, const geometry::RankShard& rank,
                    const std::function<void()>& tick,
                    std::span<float> vector) {
  const geometry::ShardTable& shard = rank.shard;
  const geometry::ZeroPlan& zero = rank.zero;
  const int replicas = zero.num_replicas();
  if (replicas == 1) return;
  std::unique_ptr<comm::Comm> split;
  if (zero.shard_size() > 1)
    split = data.split(zero.shard_index(), zero.replica_index());
  comm::Comm& group = split != nullptr ? *split : data;
  std::vector<float> mine;
  std::vector<float> all;
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const int64_t size = zero.update_range(u).size();
    const auto each =
        static_cast<size_t>(geometry::share_length(size, replicas));
    float* const unit = vector.data() + zero.state_offset(u);
    const geometry::FlatRange part =
        geometry::share_of(size, replicas, zero.replica_index());
    mine.assign(each, 0);
    std::copy(unit + part.begin, unit + part.end, mine.begin());
    all.resize(each * static_cast<size_t>(replicas));
    group.all_gather(std::as_bytes(std::span(mine)),
                     std::as_writable_bytes(std::span(all)));
    std::copy_n(all.begin(), size, unit);
    tick();
  }
}

Result<pb::Manifest> load_checkpoint(FileSystem& inner, const std::string& path,
                                     int64_t step,
                                     const manifest::JobIdentity& job,
                                     comm::Mesh& mesh,
                                     const std::function<void()>& tick,
                                     const geometry::RankShard& rank,
                                     const engine::StateView& to) {
  const auto fs = watched_file_system(inner, tick);
  const geometry::ParamTable& table = rank.shard.table();
  Result<pb::Manifest> m = read_manifest(*fs, path, step, job);
  Status status = m.status();
  if (m.ok())
    status = store::load(*fs, path, *m, table, pieces_to_load(rank), to);
  int64_t failed = status.ok() ? 0 : 1;
  mesh.world().all_reduce(std::span<int64_t>(&failed, 1), comm::Op::kMax);
  if (!status.ok()) return status;
  if (failed != 0) return cancelled(path + ": another rank could not load it");
  for (const std::span<float> v : {to.weights, to.exp_avg, to.exp_avg_sq})
    exchange_parts(mesh.data(), rank, tick, v);
  return m;
}

}  // namespace remesh::train
