#include "coordinator/ctl/cluster_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "coordinator/core/job_shape.h"
#include "coordinator/ctl/status_view.h"
#include "proto/base/json_output.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using geometry::Layout;
using planner::kTerms;
using planner::Plan;
using planner::SearchRequest;
using planner::TermName;
using planner::Terms;
using Json = nlohmann::ordered_json;

double percent(double part, double whole) { return 100 * part / whole; }
std::string gigabytes(auto bytes) {
  return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9);
}
std::string seconds_text(double s) {
  return s < 1 ? fmt::format("{:.0f} ms", 1e3 * s) : fmt::format("{:.2f} s", s);
}

// --- one plan ----------------------------------------------------------------

std::string schedule_text(const Plan& p) {
  if (p.layout.pp == 1) return "-";
  std::string out = geometry::schedule_name(p.shape.schedule);
  if (p.shape.chunks > 1) out += fmt::format(" x{}", p.shape.chunks);
  return out;
}

std::string zero_text(const Plan& p) {
  if (p.layout.dp * p.layout.cp == 1) return "-";
  return p.shape.shard_group == 0
             ? fmt::format("{}", p.shape.zero_stage)
             : fmt::format("{}/{}", p.shape.zero_stage, p.shape.shard_group);
}

std::string ranking(const std::vector<Plan>& plans) {
  std::vector<std::vector<std::string>> rows = {
      {"mesh", "ZeRO", "micro-batch", "schedule", "recompute", "step",
       "tokens/s/device", "MFU", "memory", "exposed", "bubble"}};
  for (const Plan& p : plans)
    rows.push_back(
        {p.layout.to_string(), zero_text(p), fmt::format("{}", p.shape.B),
         schedule_text(p), planner::recompute_name(p.shape.recompute),
         seconds_text(p.cost.total_s),
         fmt::format("{:.{}f}", p.cost.tokens_per_s,
                     p.cost.tokens_per_s < 100 ? 1 : 0),
         fmt::format("{:.1f} %", 100 * p.cost.mfu), gigabytes(p.memory.total()),
         fmt::format("{:.1f} %",
                     percent(p.cost.terms.exposed(), p.cost.total_s)),
         fmt::format("{:.1f} %",
                     percent(p.cost.terms.bubble, p.cost.total_s))});
  return table(std::move(rows));
}

// The terms of one or two plans, in seconds, and the memory.
std::string breakdown(const std::vector<Plan>& plans) {
  const bool both = plans.size() == 2;
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const char* what, const char* unit, double whole,
                       const auto& value) {
    const double a = value(plans[0]);
    std::vector<std::string> row{what, fmt::format("{:.3f} {}", a, unit)};
    if (both) {
      const double b = value(plans[1]);
      row.push_back(fmt::format("{:.3f} {}", b, unit));
      row.push_back(fmt::format("{:+.3f} {}", b - a, unit));
    } else if (whole > 0) {
      row.push_back(fmt::format("{:.1f} %", percent(a, whole)));
    }
    rows.push_back(row);
  };
  if (both)
    rows.push_back({"", plans[0].layout.to_string(),
                    plans[1].layout.to_string(), "difference"});
  const double total_s = plans[0].cost.total_s;
  for (const TermName& t : kTerms)
    add(t.about, "s", total_s,
        [&](const Plan& p) { return p.cost.terms.*t.seconds; });
  add("step", "s", total_s, [](const Plan& p) { return p.cost.total_s; });
  const auto in_gb = [](uint64_t bytes) {
    return static_cast<double>(bytes) / 1e9;
  };
  const double total_gb = in_gb(plans[0].memory.total());
  for (const MemoryPurpose& m : kMemoryPurposes)
    add(m.key, "GB", total_gb,
        [&](const Plan& p) { return in_gb(p.memory.*m.bytes); });
  add("memory", "GB", total_gb,
      [&](const Plan& p) { return in_gb(p.memory.total()); });
  return table(std::move(rows));
}

// --- why it is the best ------------------------------------------------------

// The terms by which `other` differs most from `best`: the largest loss, and
// the largest gain.
std::string difference(const Plan& best, const Plan& other) {
  const TermName *loss = nullptr, *gain = nullptr;
  const auto delta = [&](const TermName* t) {
    return t == nullptr
               ? 0.0
               : other.cost.terms.*t->seconds - best.cost.terms.*t->seconds;
  };
  for (const TermName& t : kTerms) {
    if (delta(&t) > delta(loss)) loss = &t;
    if (delta(&t) < delta(gain)) gain = &t;
  }
  const double share = other.cost.total_s / best.cost.total_s;
  std::string out = fmt::format("{:.1f} % {}", std::fabs(100 * (share - 1)),
                                share < 1 ? "faster" : "slower");
  std::vector<std::string> parts;
  for (const TermName* t : {loss, gain})
    if (std::fabs(delta(t)) > 0.002 * best.cost.total_s)
      parts.push_back(fmt::format("{} {}{}", t->key, delta(t) > 0 ? "+" : "-",
                                  seconds_text(std::fabs(delta(t)))));
  return parts.empty() ? out : out + ": " + join(parts);
}

// The best plan with one setting changed, as far as it is admissible.
std::vector<Plan> changes(const SearchRequest& q, const Plan& best) {
  std::vector<Plan> out;
  const auto add = [&](planner::JobShape s, const Layout& l) {
    if (q.global_batch % s.B != 0) return;
    s.microbatches = q.global_batch / s.B;
    // As in the search: Megatron-LM and PyTorch refuse them.
    if (l.pp > 1 && s.chunks > 1 && s.microbatches % (l.dp * l.pp) != 0) return;
    if (auto p = planner::predict_plan(q, s, l); p.ok())
      out.push_back(*std::move(p));
  };
  // Data parallelism makes up for another degree.
  for (int Layout::*axis : {&Layout::tp, &Layout::pp, &Layout::cp}) {
    Layout l = best.layout;
    if (l.*axis % 2 == 0) {
      l.*axis /= 2;
      l.dp *= 2;
      add(best.shape, l);
    }
    l = best.layout;
    if (l.dp % 2 == 0) {
      l.*axis *= 2;
      l.dp /= 2;
      add(best.shape, l);
    }
  }
  const auto with = [&](const auto& change) {
    planner::JobShape s = best.shape;
    change(s);
    if (!(s == best.shape)) add(std::move(s), best.layout);
  };
  if (best.shape.B % 2 == 0) with([](auto& s) { s.B /= 2; });
  with([](auto& s) { s.B *= 2; });
  using geometry::Recompute;
  for (const Recompute r :
       {Recompute::kNone, Recompute::kSelective, Recompute::kFull})
    with([&](auto& s) { s.recompute = r; });
  if (best.layout.dp * best.layout.cp > 1)
    for (int zero = 0; zero <= (best.layout.pp == 1 ? 3 : 1); ++zero)
      with([&](auto& s) { s.zero_stage = zero; });
  using geometry::ScheduleKind;
  if (best.layout.pp > 1)
    for (const auto& [kind, chunks] :
         {std::pair{ScheduleKind::k1F1B, 1},
          {ScheduleKind::kZbH1, 1},
          {ScheduleKind::kInterleaved1F1B, std::max(2, best.shape.chunks)}})
      with([&, kind = kind, chunks = chunks](auto& s) {
        s.schedule = kind;
        s.chunks = chunks;
      });
  return out;
}

// What distinguishes a changed plan: "tp4,dp8", "micro-batch 2".
std::string change_text(const Plan& best, const Plan& p) {
  if (!(p.layout == best.layout)) return p.layout.to_string();
  if (p.shape.B != best.shape.B)
    return fmt::format("micro-batch {}", p.shape.B);
  if (p.shape.recompute != best.shape.recompute)
    return fmt::format("recompute {}",
                       planner::recompute_name(p.shape.recompute));
  if (p.shape.zero_stage != best.shape.zero_stage)
    return "ZeRO " + zero_text(p);
  return schedule_text(p);
}

double usable(const SearchRequest& q) {
  return planner::kUsable * q.machine.memory_bytes;
}
bool fits(const SearchRequest& q, const Plan& p) {
  return static_cast<double>(p.memory.total()) <= usable(q);
}

// What would be saved without it; nothing if that is little.
std::string largest_loss(const SearchRequest& q, const Plan& p) {
  const Terms& t = p.cost.terms;
  const Layout& l = p.layout;
  std::vector<std::pair<double, std::string>> losses = {
      {t.tensor, l.tp > q.machine.node_devices
                     ? "the network (tensor parallelism)"
                     : "the links inside nodes (tensor parallelism)"},
      {t.context, "the messages of context parallelism"},
      {t.data, l.tp * l.cp * l.dp > q.machine.node_devices
                   ? "the network (data parallelism)"
                   : "the links inside the node (data parallelism)"},
      {t.transfer, "the messages between stages"},
      {t.bubble, "the pipeline's bubble"},
      {t.launch, "the host, which launches operations too slowly"},
      {t.straggle, "the slowest device"}};
  if (p.shape.recompute != geometry::Recompute::kNone) {
    planner::JobShape s = p.shape;
    s.recompute = geometry::Recompute::kNone;
    if (const auto without = planner::predict_plan(q, s, l); without.ok())
      losses.emplace_back(p.cost.total_s - without->cost.total_s,
                          "recomputation, for want of memory");
  }
  const auto worst = std::max_element(losses.begin(), losses.end());
  constexpr double kLittle = 0.005;
  if (worst->first < kLittle * p.cost.total_s)
    return "none above 0.5 % of the step";
  return fmt::format("{}, {:.0f} % of the step", worst->second,
                     percent(worst->first, p.cost.total_s));
}

std::string limits_text(const SearchRequest& q, const Plan& p) {
  const Terms& t = p.cost.terms;
  const double T = p.cost.total_s;
  const auto* largest = std::ranges::max_element(
      kMemoryPurposes, {}, [&](const auto& m) { return p.memory.*m.bytes; });
  return fmt::format(
      "  time: {:.0f} % matrix products, {:.0f} % other compute, {:.0f} % "
      "exposed communication, {:.0f} % bubble, {:.0f} % optimizer and "
      "stragglers\n"
      "  largest loss: {}\n"
      "  memory: {} of {} usable, of it {} {}\n",
      percent(t.gemm, T), percent(t.compute() - t.gemm, T),
      percent(t.exposed(), T), percent(t.bubble, T),
      percent(t.optimizer + t.straggle, T), largest_loss(q, p),
      gigabytes(p.memory.total()), gigabytes(usable(q)),
      gigabytes(p.memory.*largest->bytes), largest->key);
}

std::string changes_text(const SearchRequest& q, const Plan& best) {
  std::vector<std::vector<std::string>> rows;
  for (const Plan& p : changes(q, best)) {
    std::string change = change_text(best, p);
    if (p.layout.tp > q.machine.node_devices && !q.limits.tensor_across_nodes)
      change += " --tp-across-nodes";
    rows.push_back({std::move(change),
                    fits(q, p)
                        ? difference(best, p)
                        : "does not fit: " + gigabytes(p.memory.total())});
  }
  return "with one setting changed:\n" + table(std::move(rows));
}

// --- output ------------------------------------------------------------------

Json plan_json(const SearchRequest& q, const ClusterChoice& cluster,
               const Plan& p) {
  Json terms;
  for (const TermName& t : kTerms) terms[t.key] = p.cost.terms.*t.seconds;
  const auto [least, most] = step_range_s(cluster, p);
  return {{"mesh", mesh_json(core::mesh_of(p.layout))},
          {"zero_stage", p.shape.zero_stage},
          {"zero_shard_group", p.shape.shard_group},
          {"micro_batch", p.shape.B},
          {"microbatches", p.shape.microbatches},
          {"schedule", geometry::schedule_name(p.shape.schedule)},
          {"chunks", p.shape.chunks},
          {"recompute", planner::recompute_name(p.shape.recompute)},
          {"step_s", p.cost.total_s},
          {"step_range_s", most > 0 ? Json{least, most} : Json(nullptr)},
          {"tokens_per_s_per_device", p.cost.tokens_per_s},
          {"mfu", p.cost.mfu},
          {"terms_s", std::move(terms)},
          {"memory", memory_json(p.memory)},
          {"fits", fits(q, p)}};
}

Json changes_json(const SearchRequest& q, const Plan& best) {
  Json out = Json::array();
  for (const Plan& p : changes(q, best))
    out.push_back({{"change", change_text(best, p)},
                   {"step_s", p.cost.total_s},
                   {"memory", p.memory.total()},
                   {"fits", fits(q, p)}});
  return out;
}

}  // namespace

int64_t default_batch(int64_t seq_len, int64_t devices) {
  const int64_t tokens = std::max<int64_t>(int64_t{4} << 20, devices << 10);
  const int64_t batch = std::max<int64_t>(1, tokens / seq_len);
  const auto part = static_cast<uint64_t>(std::max<int64_t>(1, batch / 8));
  return batch - batch % static_cast<int64_t>(std::bit_floor(part));
}

int64_t parameters_of(const SearchRequest& q) {
  planner::JobShape s;
  s.model = q.model;
  return std::llround(
      static_cast<double>(q.model.n_layers) * planner::layer_elements(s, {}) +
      planner::vocabulary_elements(s, {}) * (q.model.tie_embeddings ? 1 : 2));
}

std::pair<double, double> step_range_s(const ClusterChoice& cluster,
                                       const Plan& plan) {
  const double error = cluster.cluster.efficiency().error();
  if (error == 0) return {0, 0};
  return {plan.cost.total_s * (1 - error), plan.cost.total_s * (1 + error)};
}

std::string step_range_text(const ClusterChoice& cluster, const Plan& plan) {
  const auto [least, most] = step_range_s(cluster, plan);
  if (most == 0) return "";
  return fmt::format(
      "  range: {} to {} a step, as nine of ten measured runs were within "
      "{:.0f} % of their prediction\n",
      seconds_text(least), seconds_text(most),
      100 * cluster.cluster.efficiency().error());
}

Result<SearchRequest> search_request(const ClusterPlanOptions& o,
                                     const ModelChoice& model,
                                     const ClusterChoice& cluster) {
  SearchRequest q;
  q.machine = planner::machine_of(cluster.cluster);
  q.model = model.model;
  q.T = o.seq_len > 0 ? o.seq_len : model.seq_len;
  q.global_batch = o.global_batch > 0       ? o.global_batch
                   : model.global_batch > 0 ? model.global_batch
                                            : default_batch(q.T, o.devices);
  q.devices = o.devices;
  q.run = {
      .precision = o.fp8 ? planner::Precision::kFp8 : planner::Precision::k16,
      .tuned_attention = true,
      .overlap_tensor = cluster.cluster.node().overlap_tensor(),
      .overlap_pipeline = true};
  q.limits = o.limits;
  q.most = static_cast<size_t>(o.meshes);
  if (o.fp8 && q.machine.fp8_flops == 0)
    return invalid_argument(fmt::format("--fp8: the {} has no fp8",
                                        cluster.cluster.device().name()));
  return q;
}

std::string plan_heading(const SearchRequest& q, const ModelChoice& model,
                         const ClusterChoice& cluster) {
  const int64_t nodes =
      (q.devices + q.machine.node_devices - 1) / q.machine.node_devices;
  const auto p = static_cast<double>(parameters_of(q));
  return fmt::format(
      "{}: {} parameters, on {} x {} ({} of {}); {} of {} a "
      "step, {}\n",
      model.name,
      p < 1e9    ? fmt::format("{:.0f}M", p / 1e6)
      : p < 1e12 ? fmt::format("{:.1f}B", p / 1e9)
                 : fmt::format("{:.2f}T", p / 1e12),
      q.devices, cluster.cluster.device().name(), plural(nodes, "node"),
      q.machine.node_devices, plural(q.global_batch, "sequence"),
      plural(q.T, "token"),
      q.run.precision == planner::Precision::kFp8 ? "fp8" : "bf16");
}

Result<std::string> cluster_plan(const ClusterPlanOptions& o,
                                 const ModelChoice& model,
                                 const ClusterChoice& cluster) {
  ASSIGN_OR_RETURN(SearchRequest q, search_request(o, model, cluster));
  std::vector<Plan> plans;
  planner::SearchResult found;
  std::vector<std::string> shown = o.compare;
  if (!o.explain.empty()) shown = {o.explain};
  q.explain = !shown.empty();
  for (std::string& text : shown) {
    std::erase(text, ' ');
    ASSIGN_OR_RETURN(const Layout l, Layout::parse(text));
    q.limits.degrees = {.dp = l.dp, .tp = l.tp, .pp = l.pp, .cp = l.cp};
    q.most = 1;
    if (l.world() != q.devices)
      return invalid_argument(fmt::format("{}: has {} instead of {}", text,
                                          plural(l.world(), "device"),
                                          q.devices));
    ASSIGN_OR_RETURN(const planner::SearchResult one, search_layouts(q));
    plans.push_back(one.plans[0]);
  }
  if (shown.empty()) {
    ASSIGN_OR_RETURN(found, search_layouts(q));
    plans = found.plans;
  }
  if (o.json) {
    Json list = Json::array();
    for (const Plan& p : plans) list.push_back(plan_json(q, cluster, p));
    Json out{{"model", model.name},
             {"parameters", parameters_of(q)},
             {"cluster", cluster.name},
             {"devices", q.devices},
             {"seq_len", q.T},
             {"global_batch", q.global_batch},
             {"usable_memory", usable(q)}};
    if (shown.empty()) {
      out["searched"] = {{"meshes", found.meshes},
                         {"plans", found.considered},
                         {"fitting", found.fitting},
                         {"simulated", found.simulated}};
      out["largest_loss"] = largest_loss(q, plans[0]);
      out["changes"] = changes_json(q, plans[0]);
    }
    out["plans"] = std::move(list);
    return json_output(out);
  }
  std::string out = plan_heading(q, model, cluster);
  if (!shown.empty()) {
    for (const Plan& p : plans) {
      out += "  " + p.settings() + "\n" + step_range_text(cluster, p);
      if (!fits(q, p))
        out += fmt::format("  does not fit: {} of {} usable\n",
                           gigabytes(p.memory.total()), gigabytes(usable(q)));
    }
    return out + breakdown(plans);
  }
  out += ranking(plans);
  out += fmt::format("searched {} plans on {} meshes: {} fit, {} simulated\n\n",
                     found.considered, found.meshes, found.fitting,
                     found.simulated);
  out += "best: " + plans[0].settings() + "\n";
  out += step_range_text(cluster, plans[0]);
  return out + limits_text(q, plans[0]) + changes_text(q, plans[0]);
}

}  // namespace remesh::ctl
