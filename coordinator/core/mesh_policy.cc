#include "coordinator/core/mesh_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/link_search.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/choose.h"
#include "parallel/planner/local.h"
#include "proto/base/text.h"

namespace remesh::core {

using geometry::Layout;

std::optional<Layout> pinned_layout(const pb::MeshRequest& request) {
  if (request.pinned().empty()) return std::nullopt;
  const auto layout = Layout::parse(request.pinned());
  if (!layout.ok()) return std::nullopt;
  return *layout;
}

MeshPolicy::MeshPolicy(const pb::Job& job,
                       std::optional<planner::JobShape> shape,
                       const planner::Machine& core)
    : job_(job),
      shape_(std::move(shape)),
      asked_(placement_request(job_, shape_)),
      chooses_axes_(planner::chooses_model_axes(asked_)) {
  asked_.core = core;
}

// --------------------------------------------------------------- placement

std::optional<int64_t> MeshPolicy::rescue_in_ms(
    const ClusterView& view, const std::string& host,
    const std::string& worker) const {
  const pb::HostFaults& faults = view.durable.host_faults();
  if (is_apart(faults.link_search(), host) &&
      faults.link_search().failures() >= job_.elastic().max_same_failures())
    return std::nullopt;
  int64_t in_ms = 0;
  for (const pb::Cordon& c : faults.cordons()) {
    // Ranks that die in training do start, and can save.
    if (!concerns(c, host, worker) || c.in_training()) continue;
    const auto wait_ms = rescue_wait_ms(c.failures(), job_.elastic());
    if (!wait_ms) return std::nullopt;
    in_ms = std::max(in_ms, *wait_ms - (view.now_ms - view.phase_since_ms));
  }
  return in_ms;
}

bool MeshPolicy::is_set_aside(const ClusterView& view, const std::string& host,
                              const std::string& worker, bool everyone) const {
  return everyone ? rescue_in_ms(view, host, worker) != 0
                  : is_cordoned(view.durable.host_faults(), host, worker);
}

bool MeshPolicy::is_usable(const ClusterView& view, const std::string& worker,
                           const Roster::Member& m, bool everyone) const {
  // A daemon that crashes in a loop is not there for long.
  const bool stays = m.joined_ms <= view.joined_by_ms;
  return m.alive && m.reported && !m.sent_away && m.report.slots() >= 0 &&
         (everyone || !m.leaving()) && (everyone || stays) &&
         !is_set_aside(view, m.report.host(), worker, everyone);
}

std::vector<std::string> MeshPolicy::builds(const ClusterView& view,
                                            bool everyone) const {
  std::map<std::string, int64_t> slots;
  for (const auto& [name, m] : view.roster.members())
    if (is_usable(view, name, m, everyone))
      slots[m.report.build()] += m.report.slots();
  std::vector<std::string> out;
  for (const auto& [build, n] : slots) out.push_back(build);
  const auto rank = [&](const std::string& build) {
    return std::pair(slots[build], build == view.durable.assignment().build());
  };
  std::ranges::stable_sort(
      out, [&](const auto& a, const auto& b) { return rank(a) > rank(b); });
  return out;
}

planner::PlacementRequest MeshPolicy::request(const ClusterView& view) const {
  const auto all = builds(view, /*everyone=*/false);
  return request(view, all.empty() ? "" : all.front(), /*everyone=*/false);
}

planner::PlacementRequest MeshPolicy::request(const ClusterView& view,
                                              const std::string& build,
                                              bool everyone) const {
  planner::PlacementRequest r = asked_;
  for (const auto& [name, m] : view.roster.members()) {
    if (!is_usable(view, name, m, everyone) || m.report.build() != build)
      continue;
    r.workers.push_back({.worker = name,
                         .host = m.report.host(),
                         .slots = m.report.slots(),
                         .cores = m.report.cores(),
                         .memory_bytes = m.report.memory_bytes(),
                         .core = m.core});
  }
  if (view.times != nullptr && chooses_axes_) {
    std::set<std::string> hosts;
    for (const planner::WorkerSlots& w : r.workers) hosts.insert(w.host);
    r.measured = view.times->measured(hosts, view.now_ms);
    r.link_bytes_per_s = view.times->link_bytes_per_s(hosts);
  }
  if (view.durable.mesh_request().scale() > 0 && !everyone) {
    r.max_slots = view.durable.mesh_request().scale();
    r.scaled = true;
  }
  const auto& previous = view.durable.assignment().ranks();
  r.previous.assign(previous.begin(), previous.end());
  planner::match_hosts(&r);
  return r;
}

Result<planner::Placement> MeshPolicy::place(
    const planner::PlacementRequest& request) const {
  constexpr size_t kKept = 2;  // with the pinned layout and without
  for (const auto& [asked, answer] : cache_)
    if (asked == request) return answer;
  if (cache_.size() >= kKept) cache_.erase(cache_.begin());
  cache_.emplace_back(request, planner::place_mesh(request));
  return cache_.back().second;
}

Result<planner::Placement> MeshPolicy::place(const ClusterView& view) const {
  if (const auto pin = pinned_layout(view.durable.mesh_request())) {
    auto placed = place(view, *pin);
    if (placed.ok()) return placed;
  }
  auto placed = place(request(view));
  if (!placed.ok() && placed.status().code() == Code::kExhausted &&
      !view.durable.host_faults().cordons().empty())
    return exhausted(placed.status().message() + "; " +
                     cordons_text(view.durable.host_faults()));
  return placed;
}

Result<planner::Placement> MeshPolicy::place(const ClusterView& view,
                                             const Layout& layout) const {
  planner::PlacementRequest r = request(view);
  r.layouts = {layout};
  return place(r);
}

MeshPolicy::Offer MeshPolicy::offer(const ClusterView& view) const {
  const planner::PlacementRequest r = request(view);
  const pb::HostFaults& faults = view.durable.host_faults();
  Offer out;
  for (const planner::WorkerSlots& w : r.workers) out.slots[w.worker] = w.slots;
  if (r.max_slots < planner::offered_slots(r)) out.most = r.max_slots;
  for (const pb::Cordon& c : faults.cordons())
    out.avoided.emplace(c.host(), c.worker());
  for (const std::string& host : faults.link_search().apart())
    out.avoided.emplace(host, "");
  return out;
}

int64_t MeshPolicy::missing_slots(const ClusterView& view) const {
  return planner::missing_slots(request(view));
}

std::optional<planner::Placement> MeshPolicy::place_as_before(
    const ClusterView& view) const {
  const pb::Assignment& a = view.durable.assignment();
  if (a.ranks_size() == 0) return std::nullopt;
  planner::Placement out{.layout = layout_of(a.mesh())};
  for (const pb::RankPlace& p : a.ranks()) {
    const Roster::Member* m = view.roster.find_alive(p.worker());
    if (m == nullptr || m->sent_away || m->report.slots() <= p.local_slot() ||
        m->report.build() != a.build() ||
        is_set_aside(view, m->report.host(), p.worker(), /*everyone=*/true))
      return std::nullopt;
    out.ranks.push_back(p);
  }
  return out;
}

bool MeshPolicy::stays_on(const ClusterView& view,
                          const planner::Placement& placement) const {
  pb::Durable after = view.durable;
  after.mutable_assignment()->mutable_ranks()->Assign(placement.ranks.begin(),
                                                      placement.ranks.end());
  const auto next = place(ClusterView{.roster = view.roster,
                                      .durable = after,
                                      .now_ms = view.now_ms,
                                      .times = view.times});
  return next.ok() && next->layout == placement.layout &&
         std::ranges::equal(
             next->ranks, placement.ranks, [](const auto& a, const auto& b) {
               return a.rank() == b.rank() && a.worker() == b.worker();
             });
}

std::optional<planner::Placement> MeshPolicy::place_on(
    const ClusterView& view, const std::string& build,
    const std::set<std::string>& hosts, int fewer) const {
  planner::PlacementRequest r = request(view, build, /*everyone=*/true);
  std::erase_if(r.workers,
                [&](const auto& w) { return !hosts.contains(w.host); });
  for (; fewer > 0; --fewer) {
    const auto largest = std::ranges::max_element(
        r.workers,
        [](const auto& a, const auto& b) { return a.slots < b.slots; });
    if (largest == r.workers.end() || largest->slots <= 1) return std::nullopt;
    --largest->slots;
  }
  const auto placed = planner::place_mesh(r);
  if (!placed.ok()) return std::nullopt;
  return *placed;
}

bool MeshPolicy::wants_hardware() const {
  return shape_ &&
         (asked_.by_speed || (asked_.layouts.empty() && chooses_axes_));
}

bool MeshPolicy::awaits_hardware(const ClusterView& view) const {
  constexpr int64_t kLongestMs = 5000;
  if (!wants_hardware() || view.joined_by_ms != INT64_MAX ||
      view.now_ms - view.roster.last_join_ms() >= kLongestMs)
    return false;
  const auto& members = view.roster.members();
  return std::ranges::any_of(members, [&](const auto& named) {
    const auto& [name, m] = named;
    return is_usable(view, name, m, /*everyone=*/false) && !m.hardware_known;
  });
}

bool MeshPolicy::awaits_joins(const ClusterView& view) const {
  const int64_t ago_ms = view.now_ms - view.roster.last_join_ms();
  return (view.joined_by_ms == INT64_MAX &&
          ago_ms < job_.elastic().join_window_ms()) ||
         awaits_hardware(view);
}

// ------------------------------------------------------------------ change

const std::string& MeshPolicy::job_change(const pb::Durable& d) const {
  if (d.generation() == compared_generation_) return job_change_;
  compared_generation_ = d.generation();
  job_change_.clear();
  if (!d.has_assignment_job()) return job_change_;  // of an older release
  const std::string keys = jobfile::changes_text(d.assignment_job(), job_);
  if (!keys.empty()) job_change_ = "job changed: " + keys;
  return job_change_;
}

std::optional<MeshPolicy::MeshChange> MeshPolicy::wanted_change(
    const ClusterView& view, int64_t not_before_ms) const {
  const pb::Durable& d = view.durable;
  if (d.stop().asked()) return MeshChange{.why = "stop"};
  for (const auto& [name, m] : view.roster.members())
    if (m.alive && m.leaving() &&
        participates(d, name, m.report.incarnation()) && has_ranks(d, name))
      return MeshChange{.why = fmt::format("worker {} is leaving", name),
                        .must = true};
  if (view.now_ms < not_before_ms) return std::nullopt;
  if (const std::string& why = job_change(d); !why.empty())
    return MeshChange{.why = why};
  if (auto search = change_for_search(view)) return search;
  const bool asked = d.mesh_request().changed();
  if (!asked && awaits_joins(view)) return std::nullopt;
  int slots = 0;
  for (const auto& [name, m] : view.roster.members())
    if (m.alive && m.reported && !m.leaving() &&
        !is_cordoned(d.host_faults(), m.report.host(), name))
      slots += m.report.slots();
  const int ranks = d.assignment().ranks_size();
  if (slots <= ranks && !asked && !d.rescue() && !time_to_look(view))
    return std::nullopt;
  const auto placed = place(view);
  if (!placed.ok()) return std::nullopt;
  const Layout& wanted = placed->layout;
  if (d.rescue())
    return MeshChange{.why = "state saved for " + wanted.to_string()};
  const Layout here = layout_of(d.assignment().mesh());
  if (wanted == here) return std::nullopt;
  const std::string way =
      fmt::format("{} -> {}", here.to_string(), wanted.to_string());
  if (asked) return MeshChange{.why = "requested: " + way};
  // Preferred layouts are listed in order of preference; without a list only a
  // larger mesh is worth a stop, or one that the cost model expects to pay.
  if (!job_.elastic().layouts().empty())
    return MeshChange{.why = "join: " + way};
  if (!wants_to_weigh(view))
    return wanted.world() <= ranks
               ? std::nullopt
               : std::optional(MeshChange{.why = "join: " + way});
  const auto gain = gain_of(view, here, wanted);
  if (!gain) return std::nullopt;
  return MeshChange{.why =
                        fmt::format("{}: {} ({})",
                                    wanted.world() > ranks ? "join" : "faster",
                                    way, *gain)};
}

// The axes of the model are the planner's, and what steps take is known.
bool MeshPolicy::wants_to_weigh(const ClusterView& view) const {
  return view.times != nullptr && chooses_axes_;
}

// Another mesh of as many ranks is looked for now and then.
bool MeshPolicy::time_to_look(const ClusterView& view) const {
  constexpr int64_t kEveryMs = 5000;
  if (!wants_to_weigh(view) || view.now_ms < next_look_ms_) return false;
  next_look_ms_ = view.now_ms + kEveryMs;
  return true;
}

// What is gained by the change before the next failure is expected or the job
// ends, if that is more than twice what the pause costs. A larger mesh is given
// the benefit of the doubt: it may be as fast as its number of ranks allows.
std::optional<std::string> MeshPolicy::gain_of(const ClusterView& view,
                                               const Layout& here,
                                               const Layout& wanted) const {
  constexpr double kWorthwhile = 2;
  const planner::PlacementRequest q = request(view);
  const auto measured = planner::measured_step_s(q, here);
  if (!measured && wanted.world() <= here.world()) return std::nullopt;
  if (!planner::admit(*shape_, here).ok()) return "job changed";
  const double now_s = measured ? *measured : planner::expected_step_s(q, here);
  double then_s = planner::expected_step_s(q, wanted);
  if (wanted.world() > here.world())
    then_s = std::min(then_s, now_s * here.world() / wanted.world());
  const double pause_s = view.times->pause_s();
  const auto left = static_cast<double>(
      job_.train().steps() -
      std::max<int64_t>(0, view.roster.committed_step(view.durable)));
  const double steps =
      std::min(left, view.times->until_failure_s(view.now_ms) / then_s);
  const double gain_s = steps * (now_s - then_s);
  if (gain_s < kWorthwhile * pause_s) return std::nullopt;
  return fmt::format("{:.2g} s a step instead of {:.2g} s, for a pause of {}",
                     then_s, now_s, format_duration(pause_s));
}

// To the mesh of the next test, if it has other hosts of those in question.
std::optional<MeshPolicy::MeshChange> MeshPolicy::change_for_search(
    const ClusterView& view) const {
  const pb::Durable& d = view.durable;
  if (d.host_faults().link_search().apart().empty() || d.rescue())
    return std::nullopt;
  const auto placed = place(view);
  if (!placed.ok()) return std::nullopt;
  std::set<std::string> here, next;
  const auto add = [&](const std::string& worker, std::set<std::string>* to) {
    const Roster::Member* m = view.roster.find_alive(worker);
    if (m != nullptr &&
        in_question(d.host_faults().link_search(), m->report.host()))
      to->insert(m->report.host());
  };
  for (const pb::RankPlace& p : d.assignment().ranks()) add(p.worker(), &here);
  for (const pb::RankPlace& p : placed->ranks) add(p.worker(), &next);
  if (here == next) return std::nullopt;
  return MeshChange{.why = search_text(d.host_faults().link_search())};
}

// ---------------------------------------------------------------- commands

Status MeshPolicy::check_layout(const ClusterView& view,
                                const Layout& layout) const {
  if (shape_) RETURN_IF_ERROR(planner::admit(*shape_, layout));
  const auto& elastic = job_.elastic();
  const int scale = view.durable.mesh_request().scale();
  if (scale > 0 && layout.world() > scale)
    return invalid_argument(
        fmt::format("{} has {}, but the job is scaled to {}; run "
                    "`remesh scale all` first",
                    layout.to_string(), plural(layout.world(), "rank"),
                    plural(scale, "slot")));
  if (layout.world() < elastic.min_slots() ||
      (elastic.max_slots() != -1 && layout.world() > elastic.max_slots()))
    return invalid_argument(
        fmt::format("{} has {}; must be from elastic.min_slots = {} to "
                    "elastic.max_slots = {}",
                    layout.to_string(), plural(layout.world(), "rank"),
                    elastic.min_slots(), elastic.max_slots()));
  return place(view, layout).status();
}

Result<bool> MeshPolicy::pin(const ClusterView& view, const std::string& text,
                             pb::MeshRequest* request) const {
  std::string pinned;
  if (text != "auto") {
    ASSIGN_OR_RETURN(const Layout layout, Layout::parse(text));
    RETURN_IF_ERROR(check_layout(view, layout));
    pinned = layout.to_string();
  }
  const bool here =
      layout_of(view.durable.assignment().mesh()).to_string() == pinned;
  if (request->pinned() == pinned &&
      (pinned.empty() || here || request->changed()))
    return false;  // it is so already, or will be
  request->set_pinned(pinned);
  request->set_changed(true);
  note_change(view, request);
  return true;
}

void MeshPolicy::note_change(const ClusterView& view,
                             pb::MeshRequest* request) const {
  const pb::Assignment& a = view.durable.assignment();
  const auto placed = place(view);
  if (a.ranks_size() == 0 || !placed.ok()) return;
  if (placed->layout == layout_of(a.mesh()))
    request->clear_changed();
  else
    request->set_changed(true);
}

bool MeshPolicy::note_fulfilled(const ClusterView& view,
                                pb::MeshRequest* request) const {
  if (!request->changed()) return false;
  note_change(view, request);
  return !request->changed();
}

Result<bool> MeshPolicy::scale(const ClusterView& view, int64_t slots,
                               pb::MeshRequest* request) const {
  RETURN_IF_ERROR(check_scale(view, slots));
  if (request->scale() == slots) return false;
  request->set_scale(static_cast<int>(slots));
  note_change(view, request);
  return true;
}

Status MeshPolicy::check_scale(const ClusterView& view, int64_t slots) const {
  const auto& elastic = job_.elastic();
  const int64_t most = elastic.max_slots();
  if (slots == 0) return ok_status();
  const std::string refused = "cannot scale to " + plural(slots, "slot");
  if (slots < elastic.min_slots() || (most != -1 && slots > most))
    return invalid_argument(
        fmt::format("{}: expected elastic.min_slots = {} to {}, or all",
                    refused, elastic.min_slots(),
                    most == -1 ? "any number"
                               : fmt::format("elastic.max_slots = {}", most)));
  if (const auto pin = pinned_layout(view.durable.mesh_request())) {
    if (pin->world() <= slots) return ok_status();
    return invalid_argument(fmt::format(
        "{}: the pinned layout {} has {}; use {} or more, or run `remesh mesh "
        "auto` first",
        refused, pin->to_string(), plural(pin->world(), "rank"),
        plural(pin->world(), "slot")));
  }
  // On one host with that many slots and unlimited memory.
  planner::PlacementRequest r = request(view);
  r.previous.clear();
  const auto placed_on = [&](int64_t n) {
    r.workers = {{.worker = "any",
                  .host = "any",
                  .slots = static_cast<int>(n),
                  .cores = static_cast<int>(n)}};
    r.max_slots = static_cast<int>(n);
    return planner::place_mesh(r);
  };
  const auto placed = placed_on(slots);
  if (placed.ok()) return ok_status();
  constexpr int64_t kTriedBeyond = 64;
  const int64_t last = most == -1 ? slots + kTriedBeyond : most;
  for (int64_t n = slots + 1; n <= last; ++n)
    if (placed_on(n).ok())
      return invalid_argument(
          fmt::format("{}: no mesh of the job is that small; the smallest uses "
                      "{}",
                      refused, n));
  return placed.status().with_context(refused);
}

}  // namespace remesh::core
