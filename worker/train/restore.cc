#include "worker/train/restore.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "proto/base/rng.h"
#include "proto/base/text.h"
#include "worker/train/watched_fs.h"

namespace remesh::train {
namespace {

// What this rank can say about the checkpoint before it reads the tensors.
Result<pb::Manifest> read_manifest(manifest::FileSystem& fs,
                                   const std::string& path, int64_t step,
                                   const manifest::JobFacts& job) {
  ASSIGN_OR_RETURN(pb::Manifest m, manifest::read_checkpoint(fs, path));
  if (m.step() != step)
    return corrupt(
        fmt::format("{}: holds step {}, expected {}", path, m.step(), step));
  const std::vector<std::string> d = manifest::differences(m, job);
  if (!d.empty())
    return invalid_argument(
        fmt::format("{}: is of another job: {}", path, join(d, "; ")));
  return m;
}

// 0: all ok, else the largest code of any rank.
int worst_code(comm::Comm& comm, const Status& status) {
  int64_t code = static_cast<int64_t>(status.code());
  comm.all_reduce(std::span<int64_t>(&code, 1), comm::Op::kMax);
  return static_cast<int>(code);
}

Status load_share(manifest::FileSystem& fs, const std::string& path,
                  const pb::Manifest& m, const geometry::ParamTable& table,
                  const Share& share, TrainState& state) {
  const store::FlatState<float> whole{.begin = 0,
                                      .weights = state.weights.span(),
                                      .exp_avg = state.exp_avg.span(),
                                      .exp_avg_sq = state.exp_avg_sq.span()};
  return store::load(
      fs, path, m, table,
      store::pieces_of_range<float>(table, share.begin, share.end, whole));
}

// ParamTable::initial_value of elements e, e + 1, ..., by whole blocks.
void fill_part(const geometry::ParamSpec& spec, uint64_t seed, int64_t e,
               std::span<float> out) {
  if (spec.init == geometry::Init::kOnes) {
    std::fill(out.begin(), out.end(), 1.0F);
    return;
  }
  random_normals(seed, hash64(spec.name), static_cast<uint64_t>(e), out);
  const auto std = static_cast<float>(spec.init_std);
  for (float& x : out) x = std * x;
}

}  // namespace

void fill_initial_weights(const geometry::ParamTable& table, uint64_t seed,
                          const Share& share, int threads,
                          std::span<float> out) {
  constexpr int64_t kChunk = 8192;
  const int64_t chunks = (share.size() + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < chunks; ++c) {
    int64_t at = share.begin + c * kChunk;
    const int64_t end = std::min(share.end, at + kChunk);
    while (at < end) {
      const size_t i = table.param_at(at);
      const int64_t e = at - table.offset(i);
      const int64_t n = std::min(end - at, table[i].numel() - e);
      fill_part(table[i], seed, e,
                out.subspan(static_cast<size_t>(at), static_cast<size_t>(n)));
      at += n;
    }
  }
}

void gather_shares(comm::Comm& comm, FlatBuffer& buffer) {
  if (comm.size() == 1) return;
  const std::span<float> all = buffer.padded();
  const auto each = static_cast<size_t>(
      share_length(static_cast<int64_t>(buffer.span().size()), comm.size()));
  const size_t whole = each * static_cast<size_t>(comm.size());
  CHECK(whole <= all.size());
  const auto mine = all.subspan(each * static_cast<size_t>(comm.rank()), each);
  const std::vector<float> sent(mine.begin(), mine.end());
  comm.all_gather(std::as_bytes(std::span(sent)),
                  std::as_writable_bytes(all.first(whole)));
}

Result<pb::Manifest> load_checkpoint(
    manifest::FileSystem& inner, const std::string& path, int64_t step,
    const geometry::ParamTable& table, const manifest::JobFacts& job,
    comm::Comm& comm, const std::function<void()>& tick, TrainState& state) {
  const auto fs = watched_file_system(inner, tick);
  Result<pb::Manifest> m = read_manifest(*fs, path, step, job);
  Status status = m.status();
  if (m.ok())
    status = load_share(
        *fs, path, *m, table,
        share_of(table.num_elements(), comm.size(), comm.rank()), state);
  const int worst = worst_code(comm, status);
  if (!status.ok()) return status;
  if (worst != 0)
    return Status(static_cast<Code>(worst),
                  path + ": another rank could not load it");
  for (FlatBuffer* b : {&state.weights, &state.exp_avg, &state.exp_avg_sq}) {
    gather_shares(comm, *b);
    tick();
  }
  state.step = m->step();
  return m;
}

}  // namespace remesh::train
