#include "parallel/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "parallel/geometry/mesh_check.h"
#include "proto/base/text.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::Recompute;
using geometry::ScheduleKind;

constexpr double kGB = 1e9;

Status admit(const SearchRequest& q, const Layout& l, int64_t microbatches,
             int chunks) {
  // Ranks are numbered with tensor-parallel peers side by side.
  const int node = q.machine.node_devices;
  if (l.tp <= node ? node % l.tp != 0 : l.tp % node != 0)
    return invalid_argument(fmt::format(
        "tensor-parallel degree {}: must divide the {} devices of a node, or "
        "be a multiple of them",
        l.tp, node));
  return geometry::check_mesh(model_of_engine(q.model), q.T, microbatches,
                              chunks, l);
}

Plan predicted(const SearchRequest& q, JobShape s, const Layout& l) {
  const Parts p = parts_of(q.machine, s, l, q.run);
  Plan plan{.shape = std::move(s), .layout = l, .cost = {}, .memory = {}};
  plan.cost = predict_step(q.machine, plan.shape, l, q.run, p);
  plan.memory = predict_worst_memory(plan.shape, l, q.run, p);
  return plan;
}

Status check_request(const SearchRequest& q) {
  constexpr int64_t kMost = 1 << 20;
  if (q.devices < 1 || q.devices > kMost)
    return invalid_argument(fmt::format("{}: must be from 1 to {}",
                                        plural(q.devices, "device"), kMost));
  if (q.T < 1 || q.global_batch < 1)
    return invalid_argument(
        fmt::format("{} sequences of {} tokens a step: both must be at least 1",
                    q.global_batch, q.T));
  return ok_status();
}

constexpr int64_t kMostContext = 1024;
constexpr int kMostChunks = 16;
constexpr int64_t kMostOdd = 32;  // micro-batches that are no power of two

// A plan without what follows from it.
struct Candidate {
  double bound_s = 0;
  Layout layout;
  int64_t B = 1;
  int zero_stage = 0, shard_group = 0;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int chunks = 1;
  Recompute recompute = Recompute::kNone;
};

class Search {
 public:
  explicit Search(const SearchRequest& q) : q_(q) {}

  Result<SearchResult> run() {
    RETURN_IF_ERROR(check_request(q_));
    enumerate();
    if (out_.meshes == 0) return none_admissible();
    if (out_.considered == 0) return none_searched();
    out_.fitting = static_cast<int64_t>(found_.size());
    if (found_.empty() && !q_.explain) return none_fits();
    if (found_.empty()) found_ = {least_};
    rank();
    return std::move(out_);
  }

 private:
  Status none_admissible() const {
    return invalid_argument(fmt::format(
        "no mesh of {} can train the model: {}", plural(q_.devices, "device"),
        refused_.ok() ? beyond_the_search() : refused_.message()));
  }
  // Why no product of the given degrees was tried.
  std::string beyond_the_search() const {
    const Degrees& d = q_.limits.degrees;
    if (d.tp > most_tensor() && q_.limits.tensor_across_nodes)
      return fmt::format("tp {}: the model has {}", d.tp,
                         plural(q_.model.n_heads, "head"));
    if (d.tp > most_tensor())
      return fmt::format(
          "tp {}: a node has {}; more only with --tp-across-nodes, up to "
          "the {} heads",
          d.tp, plural(q_.machine.node_devices, "device"), q_.model.n_heads);
    if (d.pp > q_.model.n_layers)
      return fmt::format("pp {}: the model has {}", d.pp,
                         plural(q_.model.n_layers, "layer"));
    if (d.cp > kMostContext)
      return fmt::format("cp {}: at most {}", d.cp, kMostContext);
    return "no product of the given degrees is that number";
  }
  // The options rule out every plan of the meshes.
  Status none_searched() const {
    const PlanLimits& lim = q_.limits;
    std::string why = "no plan has all of the given options";
    if (lim.B > 0 && q_.global_batch % lim.B != 0)
      why = fmt::format(
          "a micro-batch of {} must divide the {} sequences of a step", lim.B,
          q_.global_batch);
    else if (!unplanned_.empty())
      why = unplanned_;
    else if (lim.zero_stage > 1)
      why = fmt::format(
          "ZeRO stage {} is searched without a pipeline only; with one, 0 and "
          "1",
          lim.zero_stage);
    else if (lim.schedule == ScheduleKind::kInterleaved1F1B)
      why = fmt::format(
          "an interleaved pipeline needs two chunks of layers a stage: pp "
          "of at most {} for {} layers",
          q_.model.n_layers / 2, q_.model.n_layers);
    return invalid_argument(fmt::format("no mesh of {} can be planned: {}",
                                        plural(q_.devices, "device"), why));
  }
  Status none_fits() const {
    PlanLimits any;
    any.tensor_across_nodes = q_.limits.tensor_across_nodes;
    const bool limited = !(q_.limits == any);
    return exhausted(fmt::format(
        "the model fits into no mesh of {}{}: {} needs {:.1f} GB of each "
        "and may use {:.1f} of its {:.1f} GB{}",
        plural(q_.devices, "device"), limited ? " with the given options" : "",
        least_.layout.to_string(), least_bytes_ / kGB, usable() / kGB,
        q_.machine.memory_bytes / kGB, limited ? "" : cure()));
  }
  // Context parallelism divides sequences only into equal parts.
  std::string cure() const {
    const int64_t unit =
        std::min(2 * kMostContext, 2 * (q_.devices & -q_.devices));
    SearchRequest even = q_;
    even.T = (q_.T + unit - 1) / unit * unit;
    if (even.T == q_.T || !search_layouts(even).ok())
      return "; use more devices";
    return fmt::format(
        "; with sequences of {} tokens, which can be divided, "
        "it fits",
        even.T);
  }
  double usable() const { return kUsable * q_.machine.memory_bytes; }
  int64_t most_tensor() const {
    return q_.limits.tensor_across_nodes ? q_.model.n_heads
                                         : int64_t{q_.machine.node_devices};
  }

  // Divisors of n up to `most`, or the given degree.
  static std::vector<int> degrees(int given, int64_t n, int64_t most) {
    std::vector<int> out;
    for (int64_t d = 1; d <= std::min(n, most); ++d)
      if (n % d == 0 && (given == -1 || given == d))
        out.push_back(static_cast<int>(d));
    return out;
  }

  void enumerate() {
    const PlanLimits& lim = q_.limits;
    for (const int tp : degrees(lim.degrees.tp, q_.devices, most_tensor()))
      for (const int cp :
           degrees(lim.degrees.cp, q_.devices / tp, kMostContext)) {
        parts_.clear();
        for (const int pp :
             degrees(lim.degrees.pp, q_.devices / tp / cp, q_.model.n_layers)) {
          const auto dp = static_cast<int>(q_.devices / tp / cp / pp);
          if (lim.degrees.dp != -1 && lim.degrees.dp != dp) continue;
          const Layout l{.dp = dp, .pp = pp, .tp = tp, .cp = cp};
          if (const Status s = admit(q_, l, q_.global_batch, 1); !s.ok()) {
            if (refused_.ok()) refused_ = s;
            continue;
          }
          ++out_.meshes;
          plans_of(l);
        }
      }
  }

  // Keeps the reason of the first mesh without a plan.
  void unplanned(const Layout& l, const std::string& why) {
    if (unplanned_.empty()) unplanned_ = l.to_string() + ": " + why;
  }

  // Micro-batches that divide the batch, beyond kMostOdd sequences powers of
  // two; more need more memory.
  void plans_of(const Layout& l) {
    const int64_t given = q_.limits.B, most = q_.global_batch / l.dp;
    if (given > most)
      unplanned(l, fmt::format("a micro-batch of {} is more than the {} of a "
                               "data-parallel rank",
                               given, plural(most, "sequence")));
    for (int64_t B = std::max<int64_t>(1, given); B <= most;
         B += B < kMostOdd ? 1 : B) {
      const size_t before = found_.size();
      const int64_t considered = out_.considered;
      if (q_.global_batch % B == 0)
        for (const auto& [kind, chunks] : schedules(l, B))
          for (const auto& [zero, group] : shardings(l))
            least_recompute({.layout = l,
                             .B = B,
                             .zero_stage = zero,
                             .shard_group = group,
                             .schedule = kind,
                             .chunks = chunks});
      const bool fits = found_.size() > before;
      if (given != -1 || (out_.considered > considered && !fits)) return;
    }
  }

  std::vector<std::pair<ScheduleKind, int>> schedules(const Layout& l,
                                                      int64_t B) {
    std::vector<std::pair<ScheduleKind, int>> out;
    const auto wanted = [&](ScheduleKind k) {
      return !q_.limits.schedule || *q_.limits.schedule == k;
    };
    if (l.pp == 1) return {{ScheduleKind::k1F1B, 1}};
    for (const ScheduleKind k : {ScheduleKind::k1F1B, ScheduleKind::kZbH1})
      if (wanted(k)) out.emplace_back(k, 1);
    if (q_.limits.schedule == ScheduleKind::kGpipe)
      out.emplace_back(ScheduleKind::kGpipe, 1);
    // Megatron-LM and PyTorch refuse other numbers of microbatches.
    const int64_t n = q_.global_batch / B, unit = int64_t{l.dp} * l.pp;
    const bool whole = n % unit == 0;
    if (!whole && q_.limits.schedule == ScheduleKind::kInterleaved1F1B)
      unplanned(l, fmt::format("an interleaved pipeline needs a multiple of dp "
                               "x pp = {} as microbatches, not {}",
                               unit, n));
    if (whole && wanted(ScheduleKind::kInterleaved1F1B))
      for (int v = 2;
           v <= kMostChunks && int64_t{1} * v * l.pp <= q_.model.n_layers; ++v)
        out.emplace_back(ScheduleKind::kInterleaved1F1B, v);
    return out;
  }

  // ZeRO stages and shard groups: all data-parallel ranks, those of a node, and
  // of four nodes, sixteen, ...
  std::vector<std::pair<int, int>> shardings(const Layout& l) const {
    std::vector<std::pair<int, int>> out;
    const int n = l.dp * l.cp;
    const auto wanted = [&](int stage) {
      return q_.limits.zero_stage == -1 || q_.limits.zero_stage == stage;
    };
    if (wanted(0) || n == 1) out.emplace_back(0, 0);
    if (n == 1) return out;
    const int node = std::max(2, q_.machine.node_devices / l.tp);
    for (int stage = 1; stage <= (l.pp == 1 ? 3 : 1); ++stage) {
      if (!wanted(stage)) continue;
      out.emplace_back(stage, 0);
      for (int z = node; z < n; z *= 4)
        if (n % z == 0) out.emplace_back(stage, z);
    }
    return out;
  }

  JobShape shape_of(const Candidate& c) const {
    return {.model = q_.model,
            .T = q_.T,
            .B = c.B,
            .microbatches = q_.global_batch / c.B,
            .bf16 = true,
            .zero_stage = c.zero_stage,
            .shard_group = c.shard_group,
            .schedule = c.schedule,
            .chunks = c.chunks,
            .recompute = c.recompute};
  }

  // They depend on tp and cp, which are those of the last call of clear().
  const Parts& parts(const JobShape& s, const Layout& l) {
    const auto [it, is_new] = parts_.try_emplace({s.B, s.recompute});
    if (is_new) it->second = parts_of(q_.machine, s, l, q_.run);
    return it->second;
  }

  void least_recompute(Candidate c) {
    JobShape s = shape_of(c);
    for (const Recompute r :
         {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      if (q_.limits.recompute && *q_.limits.recompute != r) continue;
      s.recompute = c.recompute = r;
      const Parts& p = parts(s, c.layout);
      ++out_.considered;
      const auto bytes = static_cast<double>(
          predict_worst_memory(s, c.layout, q_.run, p).total());
      if (out_.considered == 1 || bytes < least_bytes_) {
        least_bytes_ = bytes;
        least_ = c;
      }
      if (bytes > usable()) continue;
      c.bound_s = step_lower_bound_s(q_.machine, s, c.layout, q_.run, p);
      found_.push_back(c);
      return;
    }
  }

  // Simulates in the order of the bounds. A mesh is final once the next bound
  // is not below its time.
  void rank() {
    std::ranges::stable_sort(found_,
                             [](const Candidate& a, const Candidate& b) {
                               return a.bound_s < b.bound_s;
                             });
    std::vector<Plan>& plans = out_.plans;
    const auto by_time = [](const Plan& a, const Plan& b) {
      return a.cost.total_s < b.cost.total_s;
    };
    for (const Candidate& c : found_) {
      if (plans.size() >= q_.most &&
          c.bound_s >= plans[q_.most - 1].cost.total_s)
        break;
      const auto same = std::ranges::find_if(
          plans, [&](const Plan& p) { return p.layout == c.layout; });
      if (same != plans.end() && c.bound_s >= same->cost.total_s) continue;
      ++out_.simulated;
      Plan p = predicted(q_, shape_of(c), c.layout);
      if (same == plans.end())
        plans.push_back(std::move(p));
      else if (p.cost.total_s < same->cost.total_s)
        *same = std::move(p);
      std::ranges::stable_sort(plans, by_time);
    }
    if (plans.size() > q_.most) plans.resize(q_.most);
  }

  const SearchRequest& q_;
  std::map<std::pair<int64_t, Recompute>, Parts> parts_;
  std::vector<Candidate> found_;
  Status refused_ = ok_status();
  std::string unplanned_;
  Candidate least_;  // the plan that needs least memory, and how much that is
  double least_bytes_ = 0;
  SearchResult out_;
};

}  // namespace

const char* recompute_name(Recompute recompute) {
  return recompute == Recompute::kNone        ? "none"
         : recompute == Recompute::kSelective ? "selective"
                                              : "full";
}

std::string Plan::settings() const {
  std::string out = layout.to_string();
  if (layout.dp * layout.cp > 1) {
    out += fmt::format(" ZeRO {}", shape.zero_stage);
    if (shape.shard_group > 0)
      out += fmt::format(" in groups of {}", shape.shard_group);
  }
  out += fmt::format(", micro-batch {}", shape.B);
  if (layout.pp > 1)
    out += fmt::format(", {}", geometry::schedule_name(shape.schedule));
  if (layout.pp > 1 && shape.chunks > 1)
    out += fmt::format(" x{}", shape.chunks);
  return out + fmt::format(", recompute {}", recompute_name(shape.recompute));
}

Result<SearchResult> search_layouts(const SearchRequest& request) {
  return Search(request).run();
}

Result<Plan> predict_plan(const SearchRequest& q, JobShape shape,
                          const Layout& layout) {
  RETURN_IF_ERROR(check_request(q));
  if (layout.world() != q.devices)
    return invalid_argument(fmt::format("{}: has {} devices instead of {}",
                                        layout.to_string(), layout.world(),
                                        q.devices));
  RETURN_IF_ERROR(
      admit(q, layout, shape.microbatches, chunks_on(shape, layout)));
  return predicted(q, std::move(shape), layout);
}

}  // namespace remesh::planner
