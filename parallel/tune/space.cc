#include "parallel/tune/space.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "parallel/planner/choose.h"
#include "parallel/planner/local.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/rank_placement.h"
#include "parallel/planner/search.h"
#include "parallel/planner/step_cost.h"
#include "proto/base/text.h"

namespace remesh::tune {
namespace {

using geometry::Layout;
using geometry::Recompute;
using planner::JobShape;
using planner::PlacementRequest;

constexpr Recompute kRecomputes[] = {Recompute::kNone, Recompute::kSelective,
                                     Recompute::kFull};

std::vector<double> knobs_of(const Setting& s) {
  return {std::log2(s.layout.world()),
          std::log2(s.layout.tp),
          std::log2(s.layout.pp),
          std::log2(s.layout.cp),
          std::log2(s.B),
          static_cast<double>(s.recompute),
          static_cast<double>(s.zero_stage),
          std::log2(s.threads)};
}

JobShape shape_with(const JobShape& job, const Setting& s) {
  JobShape out = job;
  out.microbatches = job.microbatches * job.B / s.B;
  out.B = s.B;
  out.recompute = s.recompute;
  out.zero_stage = s.zero_stage;
  return out;
}

// What the rank with fewest gets of its host's cores.
int least_threads(const std::vector<pb::RankPlace>& ranks) {
  int least = std::numeric_limits<int>::max();
  for (const pb::RankPlace& p : ranks) least = std::min(least, p.threads());
  return least;
}

double predicted_s(PlacementRequest& q, const Setting& s) {
  const JobShape shape = shape_with(*q.shape, s);
  q.threads = s.threads;
  return planner::predict_step(planner::rank_machine(q, s.layout.world()),
                               shape, s.layout,
                               planner::engine_execution(shape))
      .total_s;
}

bool fits(const PlacementRequest& q, const Setting& s) {
  const double have = planner::rank_machine(q, s.layout.world()).memory_bytes;
  if (have == 0) return true;
  const JobShape shape = shape_with(*q.shape, s);
  return static_cast<double>(
             planner::predict_worst_memory(shape, s.layout).total()) <= have;
}

std::vector<int> divisors(int64_t n, int64_t most) {
  std::vector<int> out;
  for (int64_t d = 1; d <= std::min(n, most); ++d)
    if (n % d == 0) out.push_back(static_cast<int>(d));
  return out;
}

// All ways to write `world` as dp tp pp cp.
std::vector<Layout> layouts_of(int world) {
  std::vector<Layout> out;
  for (const int tp : divisors(world, world))
    for (const int pp : divisors(world / tp, world))
      for (const int cp : divisors(world / tp / pp, world))
        out.push_back(
            {.dp = world / tp / pp / cp, .pp = pp, .tp = tp, .cp = cp});
  return out;
}

class Builder {
 public:
  Builder(const SpaceRequest& request, Setting own)
      : request_(request), own_(own), own_knobs_(knobs_of(own)) {}

  Space build(int64_t slots) {
    const PlacementRequest& q = request_.place;
    for (const int world : divisors(slots, slots))
      if (world >= q.min_slots)
        for (const Layout& l : layouts_of(world)) add_all(l);
    if (std::ranges::find(all_, own_) == all_.end()) all_.push_back(own_);
    return chosen();
  }

 private:
  void add_all(const Layout& l) {
    constexpr int64_t kMostSequences = 64;
    const JobShape& job = *request_.place.shape;
    const int share =
        least_threads(planner::RankPlacer(request_.place).place(l));
    std::set<int> threads = {share, std::max(1, share / 2)};
    threads.insert(own_.threads);
    const int most_zero = l.dp * l.cp > 1 ? 3 : 0;
    Setting s{.layout = l};
    std::vector<int> sizes = divisors(job.microbatches * job.B, kMostSequences);
    if (own_.B > kMostSequences) sizes.push_back(static_cast<int>(own_.B));
    for (const int B : sizes) {
      s.B = B;
      for (s.zero_stage = 0; s.zero_stage <= most_zero; ++s.zero_stage)
        for (const Recompute r : kRecomputes) {
          s.recompute = r;
          for (const int t : threads) {
            s.threads = t;
            if (wanted(s)) all_.push_back(s);
          }
        }
    }
  }

  bool wanted(const Setting& s) const {
    const std::vector<double> knobs = knobs_of(s);
    for (size_t k = 0; k < knobs.size(); ++k)
      if (request_.fixed.contains(knob_names()[k]) && knobs[k] != own_knobs_[k])
        return false;
    // A micro-batch is a power of two or the job's.
    const bool round = (s.B & (s.B - 1)) == 0 || s.B == own_.B;
    return round &&
           planner::admit(shape_with(*request_.place.shape, s), s.layout).ok();
  }

  // Fastest first by the cost model.
  Space chosen() {
    std::vector<double> seconds;
    seconds.reserve(all_.size());
    PlacementRequest place = request_.place;
    for (const Setting& s : all_) seconds.push_back(predicted_s(place, s));
    std::vector<size_t> order(all_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(
        order, [&](size_t a, size_t b) { return seconds[a] < seconds[b]; });
    Space out;
    for (const size_t i : order) {
      const bool own = all_[i] == own_;
      if (!own && !fits(request_.place, all_[i])) {
        ++out.too_large;
        continue;
      }
      if (!own && out.settings.size() >= request_.most) {
        ++out.too_slow;
        continue;
      }
      if (own) out.own = out.settings.size();
      out.settings.push_back(all_[i]);
      out.candidates.push_back(
          {.knobs = knobs_of(all_[i]), .predicted_s = seconds[i]});
    }
    return out;
  }

  const SpaceRequest& request_;
  const Setting own_;
  const std::vector<double> own_knobs_;
  std::vector<Setting> all_;
};

}  // namespace

const std::vector<std::string>& knob_names() {
  static const std::vector<std::string> names = {
      "ranks", "tp", "pp", "cp", "micro-batch", "recompute", "zero", "threads"};
  return names;
}

std::string Setting::text() const {
  return fmt::format("{}, micro-batch {}, ZeRO {}, recompute {}, {}",
                     layout.to_string(), B, zero_stage,
                     planner::recompute_name(recompute),
                     plural(threads, "thread"));
}

std::vector<std::string> Setting::overrides() const {
  std::vector<std::string> out = {
      fmt::format("parallel.data_parallel_degree={}", layout.dp),
      fmt::format("parallel.tensor_parallel_degree={}", layout.tp),
      fmt::format("parallel.pipeline_parallel_degree={}", layout.pp),
      fmt::format("parallel.context_parallel_degree={}", layout.cp),
      fmt::format("parallel.zero_stage={}", zero_stage),
      fmt::format("train.local_batch_size={}", B),
      fmt::format("train.recompute={}", planner::recompute_name(recompute)),
      fmt::format("train.threads={}", threads),
      "elastic.layouts=[]"};
  if (zero_stage == 0) out.emplace_back("parallel.zero_shard_group=0");
  return out;
}

Result<Space> make_space(const SpaceRequest& request) {
  for (const std::string& name : request.fixed)
    if (std::ranges::find(knob_names(), name) == knob_names().end())
      return invalid_argument(fmt::format("'{}' is no knob; there are {}", name,
                                          join(knob_names())));
  const PlacementRequest& q = request.place;
  if (!q.shape) return invalid_argument("the job's model is incomplete");
  ASSIGN_OR_RETURN(const planner::Placement placed, place_mesh(q));
  const Setting own{.layout = placed.layout,
                    .B = q.shape->B,
                    .recompute = q.shape->recompute,
                    .zero_stage = q.shape->zero_stage,
                    .threads = request.threads < 1 ? least_threads(placed.ranks)
                                                   : request.threads};
  int64_t slots = planner::offered_slots(q);
  if (q.max_slots > 0) slots = std::min<int64_t>(slots, q.max_slots);
  Space out = Builder(request, own).build(slots);
  out.slots = slots;
  return out;
}

}  // namespace remesh::tune
