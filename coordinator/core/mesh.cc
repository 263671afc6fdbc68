// Which mesh the job shall have: by its keys and the slots there are, or as a
// command asked. A layout that was asked for stays until another is, or until
// the slots do not suffice for it when a generation is planned.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/job_shape.h"

namespace remesh::core {

using geometry::Layout;

planner::DealRequest Coordinator::request(bool everybody) const {
  planner::DealRequest r;
  for (const auto& [name, m] : members_) {
    if (!m.alive || !m.reported || m.sent_away || (m.leaving() && !everybody))
      continue;
    r.workers.push_back({.worker = name,
                         .host = m.report.host(),
                         .slots = m.report.slots(),
                         .cores = m.report.cores(),
                         .memory_bytes = m.report.memory_bytes()});
  }
  const pb::Job& job = options_.job;
  r.degrees = {
      .dp = static_cast<int>(job.parallel().data_parallel_degree()),
      .tp = static_cast<int>(job.parallel().tensor_parallel_degree()),
      .pp = static_cast<int>(job.parallel().pipeline_parallel_degree()),
      .cp = static_cast<int>(job.parallel().context_parallel_degree())};
  r.microbatches =
      job.train().global_batch_size() / job.train().local_batch_size();
  r.min_slots = static_cast<int>(job.elastic().min_slots());
  r.max_slots = static_cast<int>(job.elastic().max_slots());
  if (durable_.scale() > 0 && !everybody) {
    r.max_slots = durable_.scale();
    r.scaled = true;
  }
  for (const pb::RankPlace& p : durable_.assignment().ranks())
    r.previous.push_back({.rank = p.rank(),
                          .worker = p.worker(),
                          .local_slot = p.local_slot(),
                          .threads = p.threads()});
  r.shape = shape_;
  for (const std::string& text : job.elastic().layouts())
    if (const auto layout = Layout::parse(text); layout.ok())
      r.layouts.push_back(*layout);
  return r;
}

Result<planner::Deal> Coordinator::deal(
    const planner::DealRequest& request) const {
  constexpr size_t kKept = 2;  // with the layout asked for, and without
  for (const auto& [asked, answer] : dealt_)
    if (asked == request) return answer;
  if (dealt_.size() >= kKept) dealt_.erase(dealt_.begin());
  dealt_.emplace_back(request, planner::deal_mesh(request));
  return dealt_.back().second;
}

std::optional<Layout> Coordinator::pinned() const {
  if (durable_.pinned().empty()) return std::nullopt;
  const auto layout = Layout::parse(durable_.pinned());
  if (!layout.ok()) return std::nullopt;
  return *layout;
}

Result<planner::Deal> Coordinator::deal() const {
  planner::DealRequest r = request();
  if (const auto pin = pinned()) {
    planner::DealRequest p = r;
    p.layouts = {*pin};
    auto dealt = deal(p);
    if (dealt.ok()) return dealt;
  }
  return deal(r);
}

// Of the newest generation, or, when the journal was lost or the job resumed,
// of the last finished step.
std::optional<pb::Mesh> Coordinator::mesh_before() const {
  if (durable_.assignment().ranks_size() > 0)
    return durable_.assignment().mesh();
  if (last_metrics_ && last_metrics_->has_mesh()) return last_metrics_->mesh();
  return std::nullopt;
}

bool Coordinator::wants_other_mesh(std::string* why, bool* must) const {
  *must = true;
  if (durable_.stop_requested()) {
    *why = "stop";
    return true;
  }
  for (const auto& [name, m] : members_) {
    if (!m.alive || !m.leaving() ||
        !participates(name, m.report.incarnation()) || !has_ranks(name))
      continue;
    *why = fmt::format("worker {} leaves", name);
    return true;
  }
  *must = false;
  const bool asked = durable_.mesh_asked();
  const bool gathers =
      now_ms_ - last_join_ms_ < options_.job.elastic().join_window_ms();
  if (now_ms_ < refused_until_ms_ || (gathers && !asked)) return false;
  int slots = 0;
  for (const auto& [name, m] : members_)
    if (m.alive && m.reported && !m.leaving()) slots += m.report.slots();
  const int ranks = durable_.assignment().ranks_size();
  if (slots <= ranks && !asked && !durable_.rescue()) return false;
  const auto d = deal();
  if (!d.ok()) return false;
  if (durable_.rescue()) {
    *why = "saved for " + d->layout.to_string();
    return true;
  }
  const Layout here = layout_of(durable_.assignment().mesh());
  if (d->layout == here) return false;
  // Preferred layouts are in order; else only a larger mesh is worth a stop.
  if (!asked && options_.job.elastic().layouts().empty() &&
      d->layout.world() <= ranks)
    return false;
  *why = fmt::format("{}: {} -> {}", asked ? "asked for" : "join",
                     here.to_string(), d->layout.to_string());
  return true;
}

Status Coordinator::ask_mesh(const std::string& text) {
  std::string pin;
  pb::EventRecord e = event("mesh_asked");
  if (text != "auto") {
    ASSIGN_OR_RETURN(const Layout layout, Layout::parse(text));
    planner::DealRequest r = request();
    r.layouts = {layout};
    if (shape_) RETURN_IF_ERROR(planner::admit(*shape_, layout));
    const auto& elastic = options_.job.elastic();
    if (durable_.scale() > 0 && layout.world() > durable_.scale())
      return invalid_argument(
          fmt::format("{} has {} ranks, and the job is scaled to {} slots; "
                      "`remesh scale all` uses all of them again",
                      layout.to_string(), layout.world(), durable_.scale()));
    if (layout.world() < elastic.min_slots() ||
        (elastic.max_slots() != -1 && layout.world() > elastic.max_slots()))
      return invalid_argument(
          fmt::format("{} has {} ranks; must be from elastic.min_slots = {} to "
                      "elastic.max_slots = {}",
                      layout.to_string(), layout.world(), elastic.min_slots(),
                      elastic.max_slots()));
    const auto dealt = deal(r);
    if (!dealt.ok()) return dealt.status();
    pin = layout.to_string();
    *e.mutable_mesh() = mesh_of(layout);
  }
  const bool here = layout_of(durable_.assignment().mesh()).to_string() == pin;
  if (durable_.pinned() == pin &&
      (pin.empty() || here || durable_.mesh_asked()))
    return ok_status();  // it is so, or will be
  durable_.set_pinned(pin);
  durable_.set_mesh_asked(true);
  persist();
  e.set_detail(pin.empty() ? "the mesh is chosen by the slots again"
                           : pin + " until another is asked for");
  if (const auto before = mesh_before()) *e.mutable_from() = *before;
  emit(std::move(e));
  return ok_status();
}

// Whether some mesh may have so many slots, however many there are; 0: all.
Status Coordinator::check_scale(int64_t slots) const {
  const auto& elastic = options_.job.elastic();
  const int64_t most = elastic.max_slots();
  if (slots == 0) return ok_status();
  if (slots < elastic.min_slots() || (most != -1 && slots > most))
    return invalid_argument(fmt::format(
        "scale to {} slots: must be from elastic.min_slots = {} to {}, or "
        "all",
        slots, elastic.min_slots(),
        most == -1 ? "any number"
                   : fmt::format("elastic.max_slots = {}", most)));
  planner::DealRequest r = request();
  if (const auto pin = pinned()) {
    if (pin->world() <= slots) return ok_status();
    return invalid_argument(fmt::format(
        "scale to {} slots: {} was asked for and has {} ranks; allowed are {} "
        "slots and more, or `remesh mesh auto` first",
        slots, pin->to_string(), pin->world(), pin->world()));
  }
  // On one host with so many slots and no limit of memory.
  const auto admits = [&](int64_t n) {
    r.previous.clear();
    r.workers = {{.worker = "any",
                  .host = "any",
                  .slots = static_cast<int>(n),
                  .cores = static_cast<int>(n)}};
    r.max_slots = static_cast<int>(n);
    return planner::deal_mesh(r);
  };
  const auto dealt = admits(slots);
  if (dealt.ok()) return ok_status();
  constexpr int64_t kLooksFurther = 64;
  for (int64_t n = slots + 1; n <= (most == -1 ? slots + kLooksFurther : most);
       ++n)
    if (admits(n).ok())
      return invalid_argument(
          fmt::format("scale to {} slots: no mesh of the job is so small; "
                      "allowed are {} slots and more",
                      slots, n));
  return dealt.status().with_context(fmt::format("scale to {} slots", slots));
}

Status Coordinator::ask_scale(int64_t slots) {
  RETURN_IF_ERROR(check_scale(slots));
  if (durable_.scale() == slots) return ok_status();
  durable_.set_scale(static_cast<int>(slots));
  const auto d = deal();
  if (durable_.assignment().ranks_size() > 0 && d.ok() &&
      d->layout != layout_of(durable_.assignment().mesh()))
    durable_.set_mesh_asked(true);
  persist();
  pb::EventRecord e = event("scale_asked");
  e.set_detail(slots == 0 ? "all slots are used again"
                          : fmt::format("{} slots, the others are spares until "
                                        "another number is asked for",
                                        slots));
  emit(std::move(e));
  return ok_status();
}

std::string Coordinator::release_pin(const Layout& chosen) {
  const auto pin = pinned();
  if (!pin || *pin == chosen) return "";
  durable_.clear_pinned();
  return pin->to_string();
}

void Coordinator::emit_released(const std::string& layout) {
  pb::EventRecord e = event("mesh_released");
  e.set_detail(fmt::format(
      "the slots do not suffice for {} any more: the mesh is chosen again",
      layout));
  emit(std::move(e));
}

// It admitted the mesh that was asked for, and admits none of the job's own.
void Coordinator::release_scale(const std::string& why) {
  pb::EventRecord e = event("scale_released");
  e.set_detail(fmt::format("all slots are used again: {}", why));
  durable_.clear_scale();
  persist();
  emit(std::move(e));
}

// The slots went before the change that was asked for began.
void Coordinator::release_unfit_pin() {
  const auto pin = pinned();
  if (!pin || durable_.phase() != pb::Durable::RUNNING ||
      layout_of(durable_.assignment().mesh()) == *pin)
    return;
  planner::DealRequest r = request();
  r.layouts = {*pin};
  if (deal(r).ok()) return;
  durable_.clear_pinned();
  durable_.clear_mesh_asked();
  persist();
  emit_released(pin->to_string());
}

}  // namespace remesh::core
