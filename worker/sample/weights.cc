#include "worker/sample/weights.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "parallel/geometry/sharding.h"

namespace remesh::sample {
namespace {

using memory::StateSegment;

constexpr int kTries = 5;

struct Held {
  std::shared_ptr<StateSegment> segment;
  StateSegment::Committed state;
};
// A state whose parts together have every parameter.
struct WholeState {
  std::vector<Held> parts;
};

std::vector<Held> states_in(const std::string& shared, uint64_t job,
                            uint64_t model) {
  std::vector<Held> out;
  for (const std::string& folder : memory::state_folders(shared))
    for (const memory::SegmentFile& f : memory::list_segments(folder, job)) {
      auto opened = StateSegment::open(f.path, job, StateSegment::Mode::kRead);
      if (!opened.ok()) continue;
      const std::shared_ptr<StateSegment> segment = std::move(*opened);
      for (const auto& state : segment->contents().states)
        if (state.info.model == model) out.push_back({segment, state});
    }
  return out;
}

// The newest one above that step. NotFound.
Result<WholeState> find_state(const geometry::ParamTable& table,
                              const std::string& shared, uint64_t job,
                              int64_t above_step) {
  // By step and generation, newest first: the ranks' parts.
  std::map<std::pair<int64_t, int64_t>, std::map<int, Held>, std::greater<>>
      found;
  for (Held& held : states_in(shared, job, geometry::model_id(table))) {
    const memory::StateInfo& info = held.state.info;
    if (info.step > above_step)
      found[{info.step, info.generation}].emplace(info.rank, std::move(held));
  }
  for (const auto& [when, parts] : found) {
    const geometry::Sharding& sharding =
        parts.begin()->second.state.info.sharding;
    std::vector<int> ranks;
    WholeState out;
    for (const auto& [rank, held] : parts) {
      if (!(held.state.info.sharding == sharding)) continue;
      ranks.push_back(rank);
      out.parts.push_back(held);
    }
    if (geometry::check_complete(table, sharding, ranks).ok()) return out;
  }
  return not_found("no complete state is in the memory of this host");
}

// Copies what the part has. Unavailable if it was replaced meanwhile.
Status copy_part(const geometry::ParamTable& table, const Held& held,
                 std::span<float> weights) {
  const memory::StateInfo& info = held.state.info;
  ASSIGN_OR_RETURN(const geometry::RankShard rank,
                   geometry::make_rank_shard(table, info.sharding, info.rank));
  const std::span<const float> from =
      held.segment->read(held.state.buffer, info.elements).weights;
  for (const geometry::Piece& piece : geometry::held_pieces(rank)) {
    const int64_t columns = geometry::full_rect(table[piece.param]).cols;
    const geometry::Rect& rect = piece.rect;
    for (int64_t r = 0; r < rect.rows; ++r)
      std::copy_n(from.begin() + piece.at + r * piece.row_stride, rect.cols,
                  weights.begin() + table.offset(piece.param) +
                      (rect.row + r) * columns + rect.col);
  }
  if (!held.segment->is_valid(held.state))
    return unavailable("the state was replaced while it was read");
  return ok_status();
}

}  // namespace

Result<Weights> weights_in_memory(const geometry::ModelConfig& model,
                                  uint64_t run_id, int64_t above_step,
                                  const std::string& shared) {
  if (!model.validate().ok()) return not_found("the model is not known");
  const uint64_t job = std::max<uint64_t>(1, run_id);
  const auto table = geometry::ParamTable::make(model);
  RETURN_IF_ERROR(find_state(table, shared, job, above_step).status());
  auto load = [shared, job, above_step](const geometry::ParamTable& t,
                                        std::span<float> weights) {
    Status last;
    for (int i = 0; i < kTries; ++i) {
      ASSIGN_OR_RETURN(const WholeState state,
                       find_state(t, shared, job, above_step));
      last = ok_status();
      for (const Held& part : state.parts)
        if (last.ok()) last = copy_part(t, part, weights);
      if (last.code() != Code::kUnavailable) break;
    }
    return last;
  };
  return Weights{model, std::move(load)};
}

namespace {

// Reads all weights in some twenty parts.
Status load_from(const huggingface::WeightSource& source,
                 const geometry::ParamTable& table, std::span<float> weights,
                 const LoadTick& tick) {
  const std::vector<geometry::Piece> all = geometry::whole_pieces(table);
  const int64_t part = table.num_elements() / 20;
  int64_t done = 0;
  for (size_t first = 0, last; first < all.size(); first = last) {
    const int64_t from = done;
    for (last = first; last < all.size() && done - from <= part; ++last)
      done += all[last].rect.numel();
    RETURN_IF_ERROR(source.load(
        table, std::span(all).subspan(first, last - first), weights, [] {}));
    if (tick)
      tick(sizeof(float) * static_cast<uint64_t>(done),
           sizeof(float) * static_cast<uint64_t>(table.num_elements()));
  }
  return ok_status();
}

// The model with the adapters `live`.
Result<Weights> with_base(FileSystem& fs, const ModelFiles& files,
                          const Weights& live, const LoadTick& tick) {
  auto opened = huggingface::WeightSource::open(fs, files.base);
  if (!opened.ok()) return opened.status();
  RETURN_IF_ERROR(
      opened->check_base(files.base, files.base_fingerprint, [] {}).status());
  const auto base =
      std::make_shared<huggingface::WeightSource>(std::move(*opened));
  auto load = [base, live, tick](const geometry::ParamTable& table,
                                 std::span<float> weights) -> Status {
    huggingface::Adapters a{.table = geometry::ParamTable::make(live.model),
                            .values = {}};
    a.values.resize(static_cast<size_t>(a.table.num_elements()));
    RETURN_IF_ERROR(live.load(a.table, a.values));
    RETURN_IF_ERROR(load_from(*base, table, weights, tick));
    huggingface::add_adapters(a, table, geometry::whole_pieces(table), weights);
    return ok_status();
  };
  return Weights{live.model.base(), std::move(load)};
}

}  // namespace

Result<Weights> open_weights(FileSystem& fs, const ModelFiles& files,
                             const LoadTick& tick) {
  if (files.run_id != 0) {
    int64_t saved = 0;
    if (const auto found = manifest::scan(fs, files.weights); found.ok())
      if (const auto* newest = manifest::choose_newest_valid(*found))
        saved = newest->step;
    auto live = weights_in_memory(files.model, files.run_id, saved);
    if (live.ok() && files.model.lora.rank > 0)
      return with_base(fs, files, *live, tick);
    if (live.ok() || live.status().code() != Code::kNotFound) return live;
  }
  auto opened = huggingface::WeightSource::open(fs, files.weights);
  if (!opened.ok()) return opened.status();
  const auto source =
      std::make_shared<huggingface::WeightSource>(std::move(*opened));
  auto load = [source, tick](const geometry::ParamTable& table,
                             std::span<float> weights) {
    return load_from(*source, table, weights, tick);
  };
  return Weights{source->model(), std::move(load)};
}

}  // namespace remesh::sample
